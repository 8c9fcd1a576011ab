"""Between which workers prefix fetches have failed of late; never knows why, and reads no clock.

A way that no hand-off takes is never probed, as between two prefill workers. Where it is shut each prefix fetch over it
costs its prompt the wait until its worker gives up, so it is left out for longer and longer, until one comes.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.routing.worker_view import Pair

NUM_FAILURES = 2
"""In a row; one may be of blocks that were evicted a moment ago."""
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0


@dataclass(slots=True)
class _Record:
    num_failures: int = 0
    backoff_s: float = 0.0
    until: float = 0.0


class PrefixFetchBackoff:
    """By (producer, consumer). Those that never failed cost nothing."""

    def __init__(self) -> None:
        self._records: dict[Pair, _Record] = {}

    def failed(self, link: Pair, now: float) -> None:
        """Nothing came of a prefix fetch. Those that were asked for before the way was left out tell nothing new."""
        record = self._records.setdefault(link, _Record())
        if now < record.until:
            return
        record.num_failures += 1
        if record.num_failures >= NUM_FAILURES:
            record.backoff_s = min(max(FIRST_BACKOFF_S, 2 * record.backoff_s), LONGEST_BACKOFF_S)
            record.until = now + record.backoff_s

    def came(self, link: Pair) -> None:
        """Something was read."""
        self._records.pop(link, None)

    def forget(self, worker: WorkerRef) -> None:
        """It is gone."""
        self._records = {link: record for link, record in self._records.items() if worker not in link}

    def links(self, now: float) -> Set[Pair]:
        """Those that are left out now."""
        if not self._records:
            return frozenset()
        return {link for link, record in self._records.items() if record.until > now}

    def __repr__(self) -> str:
        return f"<prefix fetches failed over {len(self._records)} links>"
