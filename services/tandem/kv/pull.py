"""What a consumer knows of one hand-off; only the PullBook writes it, and decides what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, HandoffKey, JobKey, WorkerRef
from tandem.kv.handoff import BlockDigest, PullState
from tandem.kv.pull_actions import PrefixFetchDone, PullStats


@dataclass(frozen=True, slots=True)
class PrefixFetchTerms:
    """A cached prefix whose blocks before `first_index` are here. It is given up after `timeout_s` without a sign of
    it, and after `limit_s` in all."""

    first_index: int
    timeout_s: float
    limit_s: float


class Pull:
    """One open hand-off as its consumer sees it. `next_index` is the first offered block that no read was started for.
    `num_known` blocks are to be read or were found here; of a sequence that moves that many is said only in the end.
    `num_ready` leading blocks are here, and `num_writable` leading `blocks` may be read into. `is_told`: the source has
    said its last word.

    Of a prefix fetch the blocks before `first_index` are never offered, and it is of use without the last ones."""

    def __init__(
        self,
        key: HandoffKey,
        job: JobKey,
        source: WorkerRef,
        now: float,
        timeout_s: float,
        prefix_fetch: PrefixFetchTerms | None = None,
    ) -> None:
        self.key = key
        self.job = job
        self.source = source
        self.timeout_s = timeout_s if prefix_fetch is None else min(timeout_s, prefix_fetch.timeout_s)
        self.ends_at = math.inf if prefix_fetch is None else now + prefix_fetch.limit_s
        self.is_prefix_fetch = prefix_fetch is not None
        self.first_index = 0 if prefix_fetch is None else prefix_fetch.first_index
        self.state = PullState.WAITING
        self.was_announced = False
        self.is_moving = False
        self.is_told = False
        self.has_asked = False
        self.offered: list[BlockDigest] = []
        self.first_tokens: tuple[SampledToken, ...] = ()
        self.num_computed = 0
        self.num_cached = 0
        self.blocks: tuple[BlockId, ...] = ()
        self.num_writable = 0
        self.num_known = 0
        self.num_hits = self.num_ready = self.first_index
        self.next_index = 0
        self.open_reads: set[int] = set()
        self.lease_until: float | None = None
        self.read_at = now
        self.moved_at = now
        self.first_at = self.last_at = self.busy_since = now
        self.busy_s = 0.0
        self.num_exposed = 0
        # By the first of their blocks, how many came that are ahead of one that did not.
        self._ahead: dict[int, int] = {}

    @property
    def due_at(self) -> float:
        """When it is overdue, if nothing comes."""
        since = self.moved_at if self.lease_until is None else min(self.moved_at, self.lease_until)
        return min(since + self.timeout_s, self.ends_at)

    @property
    def is_live(self) -> bool:
        return self.state in (PullState.WAITING, PullState.READING)

    @property
    def is_open_ended(self) -> bool:
        """Nobody knows yet how many blocks there will be."""
        return self.is_moving and not self.is_told

    @property
    def is_leased(self) -> bool:
        """What was read last was read within the lease."""
        return self.lease_until is not None and self.read_at < self.lease_until

    @property
    def is_short(self) -> bool:
        """The source has said its last word, and offered less than there is to read."""
        return self.state is PullState.READING and self.is_told and self.num_offered < self.num_known

    @property
    def is_complete(self) -> bool:
        """All that the source has is here, and its word that the lease outlived the last read."""
        has_all = self.is_told and self.next_index >= self.num_known and not self.open_reads
        return self.state is PullState.READING and has_all and self.is_leased

    @property
    def num_offered(self) -> int:
        """Blocks from the first on that may be read, or need not be."""
        return self.first_index + len(self.offered)

    @property
    def num_readable(self) -> int:
        """Leading blocks that are offered and have a place here that may be written."""
        num_wanted = self.num_writable if self.is_open_ended else min(self.num_known, self.num_writable)
        return min(self.num_offered, num_wanted)

    def num_told(self, block_size: int) -> int:
        """Blocks of all tokens whose KV is offered, once the source has said its last word; of what is lent no more
        than were asked for."""
        num_blocks = max(self.num_hits, -(-self.num_computed // block_size))
        return min(num_blocks, len(self.blocks)) if self.is_prefix_fetch else num_blocks

    def offered_in(self, first: int, stop: int) -> tuple[BlockDigest, ...]:
        """Those of the blocks `[first, stop)`."""
        return tuple(self.offered[first - self.first_index : stop - self.first_index])

    def read(self, first: int, num_blocks: int) -> None:
        """The blocks from `first` on are here; reads end in any order."""
        self._ahead[first] = num_blocks
        while self.num_ready in self._ahead:
            self.num_ready += self._ahead.pop(self.num_ready)

    def stats(self, num_here: int, now: float) -> PullStats:
        """Of the first `num_here` blocks."""
        busy_s = self.busy_s + (now - self.busy_since if self.open_reads else 0.0)
        times = (now - self.first_at, now - self.last_at, busy_s)
        return PullStats(self.num_hits, num_here - self.num_hits, self.num_exposed, *times)

    def prefix_fetch_over(self, now: float) -> PrefixFetchDone:
        """What is here of a prefix fetch that ends: nothing that may have been read after the lease."""
        num_ready = self.num_ready if self.is_leased else self.num_hits
        return PrefixFetchDone(self.key, self.job, self.source, num_ready, self.stats(num_ready, now))

    def __repr__(self) -> str:
        return (
            f"<pull {self.key} from {self.source} {self.state.name} {self.next_index}/{self.num_known} blocks, "
            f"{self.num_offered} offered, {len(self.open_reads)} reads>"
        )
