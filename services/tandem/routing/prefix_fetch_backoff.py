"""Exclude links over which prefix fetches failed recently from further fetches. Callers pass the time.

A link that no hand-off uses is not probed, for example between two prefill workers. Where such a link is down, each
prefix fetch over it delays its prompt until the worker's timeout, so the link is excluded for longer and longer, until
a fetch succeeds.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.routing.worker_view import Pair

NUM_FAILURES = 2
"""Number of failures in a row after which a link is excluded; a single one may be due to blocks that were evicted a
moment ago."""
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0


@dataclass(slots=True)
class _Record:
    num_failures: int = 0
    backoff_s: float = 0.0
    until: float = 0.0


class PrefixFetchBackoff:
    """Decide over which links no prefix is fetched for some time, because recent fetches failed. A link is a pair
    (producer, consumer) of workers.

    Links without a failure since their last success use no memory. `now` is in seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self._records: dict[Pair, _Record] = {}

    def failed(self, link: Pair, now: float) -> None:
        """Count a prefix fetch over the link (producer, consumer) that read nothing; ignored while the link is
        excluded.

        From the `NUM_FAILURES`-th failure in a row on, each counted failure excludes the link for a longer time.
        """
        record = self._records.setdefault(link, _Record())
        if now < record.until:
            return
        record.num_failures += 1
        if record.num_failures >= NUM_FAILURES:
            record.backoff_s = min(max(FIRST_BACKOFF_S, 2 * record.backoff_s), LONGEST_BACKOFF_S)
            record.until = now + record.backoff_s

    def on_success(self, link: Pair) -> None:
        """Record that a prefix fetch over the link (producer, consumer) read something: the failures of the link are
        forgotten, and it is usable again."""
        self._records.pop(link, None)

    def forget(self, worker: WorkerRef) -> None:
        """Drop the failures of all links from or to a worker that no longer exists."""
        self._records = {link: record for link, record in self._records.items() if worker not in link}

    def links(self, now: float) -> Set[Pair]:
        """Return the links (producer, consumer) over which no prefix should be fetched at the time `now`."""
        if not self._records:
            return frozenset()
        return {link for link, record in self._records.items() if record.until > now}

    def __repr__(self) -> str:
        return f"<prefix fetches failed over {len(self._records)} links>"
