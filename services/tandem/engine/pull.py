"""Hold the state of one open hand-off on its consumer's side; `engine.kv_consumer` decides what changes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.events import SampledToken
from tandem.core.ids import BlockHash, BlockId, HandoffKey, WorkerRef
from tandem.core.request import Job, ResumeJob
from tandem.engine.job_timeline import PullOutcome, PullTimes
from tandem.kv.block_pool import BlockTable
from tandem.kv.handoff import BlockDigest, PullState


@dataclass(eq=False, repr=False)
class Pull:
    """Hold the state of one open hand-off on its consumer's side: the read of the KV of a `ResumeJob`, or of a remote
    prefix for another job.

    - `offered`: blocks that the source announced, from block index `first_index` on. The source of a remote prefix does
      not offer the blocks before, because they are cached here.
    - `table`, `blocks`: the local block table that is read into, and its block ids. `hashes`: the block hashes of a
      remote prefix.
    - `num_hits`: leading blocks that were local before the pull. `num_ready`: leading blocks that are local now.
    - `num_known`: leading blocks that are to be read or were local before. For a migrating sequence it is final only
      after the last announcement.
    - `num_writable`: leading `blocks` that reads may write now. `next_index`: the first block for which no read was
      started.
    - `num_computed`: tokens whose KV the source offers. `num_cached`: prompt tokens that were prefix-cache hits at the
      source. `first_tokens`: the sampled tokens of the last announcement.
    - `was_announced`: at least one announcement has arrived. `has_last_announcement`: the last one has arrived.
    - `is_migrating`: the sequence migrates from the source. `remainder_requested`: the consumer has requested from the
      source that it stops this sequence and hands it over.
    - `open_reads`: numbers of the reads in flight. `num_exposed`: blocks not read when the last announcement arrived.
    - `lease_until`: end of the lease at the source; None before the source's first answer.
    - `busy_since`: time since which at least one read is in flight. `busy_s`: seconds with reads in flight before that
      time.

    A pull is given up after `timeout_s` without progress, and at `ends_at`. Times are in seconds of the caller's clock.
    If only the first blocks of a remote prefix arrive, they are used.
    """

    key: HandoffKey
    job: Job
    source: WorkerRef
    opened_at: float
    timeout_s: float
    ends_at: float = math.inf
    first_index: int = 0
    hashes: Sequence[BlockHash] = ()
    state: PullState = PullState.WAITING
    was_announced: bool = False
    is_migrating: bool = False
    has_last_announcement: bool = False
    remainder_requested: bool = False
    offered: list[BlockDigest] = field(default_factory=list)
    first_tokens: tuple[SampledToken, ...] = ()
    num_computed: int = 0
    num_cached: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    blocks: tuple[BlockId, ...] = ()
    num_writable: int = 0
    num_known: int = 0
    num_hits: int = 0
    num_ready: int = 0
    next_index: int = 0
    open_reads: set[int] = field(default_factory=set)
    lease_until: float | None = None
    busy_since: float = 0.0
    busy_s: float = 0.0
    num_exposed: int = 0

    def __post_init__(self) -> None:
        self.read_at = self.opened_at
        self.progress_at = self.opened_at
        self.first_announced_at = self.opened_at
        self.last_announced_at = self.opened_at
        # Finished reads behind a block that has not arrived yet: number of blocks by first block.
        self._ahead: dict[int, int] = {}

    @property
    def is_prefix_fetch(self) -> bool:
        """Return whether the pull reads a remote prefix, not the KV of a `ResumeJob`."""
        return not isinstance(self.job, ResumeJob)

    @property
    def due_at(self) -> float:
        """Return the time at which the pull is overdue if nothing arrives before."""
        since = self.progress_at if self.lease_until is None else min(self.progress_at, self.lease_until)
        return min(since + self.timeout_s, self.ends_at)

    @property
    def is_open_ended(self) -> bool:
        """Return whether the final number of blocks is unknown, because the sequence migrates and still runs at its
        source."""
        return self.is_migrating and not self.has_last_announcement

    @property
    def is_leased(self) -> bool:
        """Return whether the last read is known to have ended before the lease did, so that what it read is valid."""
        return self.lease_until is not None and self.read_at < self.lease_until

    @property
    def is_short(self) -> bool:
        """Return whether the source has offered fewer blocks than are to be read, and will offer no more."""
        has_too_few = max(self.num_offered, self.num_hits) < self.num_known
        return self.state is PullState.READING and self.has_last_announcement and has_too_few

    @property
    def is_complete(self) -> bool:
        """Return whether all blocks have been read, and the lease is known to have outlived the last read."""
        has_all = self.has_last_announcement and self.next_index >= self.num_known and not self.open_reads
        return self.state is PullState.READING and has_all and self.is_leased

    @property
    def num_offered(self) -> int:
        """Count the leading blocks of the sequence that the source has offered or that are local already."""
        return self.first_index + len(self.offered)

    @property
    def num_readable(self) -> int:
        """Count the leading blocks that the source has offered and whose local blocks may be written now."""
        num_allowed = self.num_writable if self.is_open_ended else min(self.num_known, self.num_writable)
        return min(self.num_offered, num_allowed)

    def num_final_blocks(self, block_size: int) -> int:
        """Return how many leading blocks the pull will have in the end, including those that were local before.

        They hold the `num_computed` tokens; a remote prefix has at most the requested blocks. Valid only after the last
        announcement.
        """
        num_blocks = max(self.num_hits, -(-self.num_computed // block_size))
        return min(num_blocks, len(self.blocks)) if self.is_prefix_fetch else num_blocks

    def read(self, first: int, num_blocks: int) -> None:
        """Record that the `num_blocks` blocks from block index `first` on have been read, and raise `num_ready` to the
        first block that is still missing. Reads may end in any order."""
        self._ahead[first] = num_blocks
        while self.num_ready in self._ahead:
            self.num_ready += self._ahead.pop(self.num_ready)

    def times(self, outcome: PullOutcome, num_local: int, now: float, block_size: int, block_bytes: int) -> PullTimes:
        """Return the record of this pull for reports, when it ends at `now` with `outcome`.

        `num_local`: how many leading blocks of the sequence are in this worker's memory at the end. The first
        `num_hits` of them were here before the pull and do not count as read. `block_size`: tokens per block.
        `block_bytes`: bytes per block.
        """
        num_blocks = num_local - self.num_hits
        return PullTimes(
            kind="prefix" if self.is_prefix_fetch else "handoff",
            outcome=outcome,
            source=self.source,
            num_blocks=num_blocks,
            num_bytes=num_blocks * block_bytes,
            num_exposed_bytes=min(self.num_exposed, num_blocks) * block_bytes,
            num_cached_tokens=self.num_hits * block_size,
            first_announced_at=self.first_announced_at,
            last_announced_at=max(self.first_announced_at, self.last_announced_at),
            ready_at=now,
            busy_s=self.busy_s + (now - self.busy_since if self.open_reads else 0.0),
        )

    def __repr__(self) -> str:
        return (
            f"<pull {self.key} from {self.source} {self.state.name} {self.next_index}/{self.num_known} blocks, "
            f"{self.num_offered} offered, {len(self.open_reads)} reads>"
        )
