"""Hold what a consumer knows about one hand-off. Only `PullTable` writes a `Pull` and decides what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, HandoffKey, JobKey, WorkerRef
from tandem.kv.handoff import BlockDigest, PullState
from tandem.kv.pull_actions import PrefixFetchDone, PullStats


@dataclass(frozen=True, slots=True)
class PrefixFetchTerms:
    """Terms of a remote prefix fetch: the blocks before `first_index` are local already; the fetch is given up after
    `timeout_s` without progress and after `limit_s` in all."""

    first_index: int
    timeout_s: float
    limit_s: float


class Pull:
    """State of one open hand-off on its consumer's side.

    - `offered`: the announced blocks from `first_index` on; `next_index`: the first block for which no read was
      started.
    - `num_known`: leading blocks that are to be read or were prefix hits. For a migrating sequence the number is final
      only after the last announcement.
    - `num_hits`: leading blocks that were local before; `num_ready`: leading blocks that are local now.
    - `num_writable`: leading `blocks` that may be written by reads now.
    - `has_last_announcement`: the source has sent the last announcement.
    - `remainder_requested`: the consumer has asked the source of a migrating sequence for the remainder.

    Times are seconds of the caller's clock. The source of a remote prefix fetch does not offer the blocks before
    `first_index`, and the fetch is useful without its last blocks.
    """

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
        self.is_migrating = False
        self.has_last_announcement = False
        self.remainder_requested = False
        self.offered: list[BlockDigest] = []
        self.first_tokens: tuple[SampledToken, ...] = ()
        self.num_computed = 0
        self.num_cached = 0
        self.blocks: tuple[BlockId, ...] = ()
        self.num_writable = 0
        self.num_known = 0
        self.num_hits = self.first_index
        self.num_ready = self.first_index
        self.next_index = 0
        self.open_reads: set[int] = set()
        self.lease_until: float | None = None
        self.read_at = now
        self.progress_at = now
        self.first_announced_at = now
        self.last_announced_at = now
        self.busy_since = now
        self.busy_s = 0.0
        self.num_exposed = 0
        # Finished reads behind a block that has not arrived yet: number of blocks by first block.
        self._ahead: dict[int, int] = {}

    @property
    def due_at(self) -> float:
        """Return when the pull is overdue if nothing arrives before."""
        since = self.progress_at if self.lease_until is None else min(self.progress_at, self.lease_until)
        return min(since + self.timeout_s, self.ends_at)

    @property
    def is_live(self) -> bool:
        return self.state in (PullState.WAITING, PullState.READING)

    @property
    def is_open_ended(self) -> bool:
        """Return whether the number of blocks is still open, because the sequence migrates and its source goes on."""
        return self.is_migrating and not self.has_last_announcement

    @property
    def is_leased(self) -> bool:
        """Return whether the last read ended within the lease."""
        return self.lease_until is not None and self.read_at < self.lease_until

    @property
    def is_short(self) -> bool:
        """Return whether the source offered fewer blocks than there are to read, and will offer no more."""
        return self.state is PullState.READING and self.has_last_announcement and self.num_offered < self.num_known

    @property
    def is_complete(self) -> bool:
        """Return whether all blocks have been read, and the lease is known to have outlived the last read."""
        has_all = self.has_last_announcement and self.next_index >= self.num_known and not self.open_reads
        return self.state is PullState.READING and has_all and self.is_leased

    @property
    def num_offered(self) -> int:
        """Count the leading blocks that may be read or are local already."""
        return self.first_index + len(self.offered)

    @property
    def num_readable(self) -> int:
        """Count the leading blocks that are offered and have a local block that may be written."""
        num_allowed = self.num_writable if self.is_open_ended else min(self.num_known, self.num_writable)
        return min(self.num_offered, num_allowed)

    def num_final_blocks(self, block_size: int) -> int:
        """Count the blocks of all tokens whose KV is offered, after the last announcement; of a remote prefix at most
        the requested number."""
        num_blocks = max(self.num_hits, -(-self.num_computed // block_size))
        return min(num_blocks, len(self.blocks)) if self.is_prefix_fetch else num_blocks

    def offered_in(self, first: int, stop: int) -> tuple[BlockDigest, ...]:
        """Return the offered blocks at positions `[first, stop)`."""
        return tuple(self.offered[first - self.first_index : stop - self.first_index])

    def read(self, first: int, num_blocks: int) -> None:
        """Record that `num_blocks` blocks from position `first` on were read; reads end in any order."""
        self._ahead[first] = num_blocks
        while self.num_ready in self._ahead:
            self.num_ready += self._ahead.pop(self.num_ready)

    def stats(self, num_local: int, now: float) -> PullStats:
        """Return the statistics of a pull that ends at `now` with its first `num_here` blocks local."""
        busy_s = self.busy_s + (now - self.busy_since if self.open_reads else 0.0)
        times = (now - self.first_announced_at, now - self.last_announced_at, busy_s)
        return PullStats(self.num_hits, num_local - self.num_hits, self.num_exposed, *times)

    def prefix_fetch_done(self, now: float) -> PrefixFetchDone:
        """Return the result of a remote prefix fetch that ends; blocks that may have been read after the lease do not
        count."""
        num_ready = self.num_ready if self.is_leased else self.num_hits
        return PrefixFetchDone(self.key, self.job, self.source, num_ready, self.stats(num_ready, now))

    def __repr__(self) -> str:
        return (
            f"<pull {self.key} from {self.source} {self.state.name} {self.next_index}/{self.num_known} blocks, "
            f"{self.num_offered} offered, {len(self.open_reads)} reads>"
        )
