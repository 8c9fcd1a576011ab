"""Decide which blocks are read from files and written to files, and which jobs wait for a read.

A block is written once it is in host memory, and read into host memory, from which a prefix hit copies it to the
device. If the file of a block is missing, incomplete or changed, the read ends before that block; the job then computes
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.core.ids import BlockHash, HostSlot, JobKey
from tandem.core.step_cost import StepCost
from tandem.engine.effects import ReadFiles, WriteFiles
from tandem.engine.kv_consumer import MAX_PREFIX_FETCH_S, prefix_fetch_limits
from tandem.kv.block_pool import BlockPool

MAX_READ_BLOCKS = 128
"""Most blocks of one `ReadFiles`. A longer prefix takes several of them, so that no read holds all of host memory, and
that a prefix for which no job waits any more is not read to its end."""
MAX_OPEN_WRITES = 32
"""Most blocks that wait to be written at the same time. Their slots of host memory cannot be reused."""
WRITE_PAUSE_S = 10.0
"""Seconds without a write after one that failed, as on a full disk."""
_FORGETTING = 0.9
"""Factor on the estimated duration of a read each time that it kept a prefix from being read, so that it is tried again
some time."""


@dataclass(eq=False, slots=True)
class _PrefixRead:
    """A read of blocks of the prefix `hashes`, by one `ReadFiles` after the other.

    `slots`: the host slots of the open `ReadFiles`, which begins at block `first` of the prefix. `num_read`: how many
    of its blocks have arrived. `waiting`: the jobs that wait for the read, each with the hashes of its own prefix.
    `ends_at`: the time at which they stop waiting.
    """

    hashes: tuple[BlockHash, ...]
    first: int
    slots: list[HostSlot]
    ends_at: float
    waiting: dict[JobKey, tuple[BlockHash, ...]] = field(default_factory=dict)
    num_read: int = 0

    @property
    def stop(self) -> int:
        """Return the index of the first block that has not arrived."""
        return self.first + self.num_read

    def take_served(self) -> dict[JobKey, tuple[BlockHash, ...]]:
        """Return the jobs for which all blocks that they share with this prefix have arrived; they wait for this read
        no more."""
        after = self.hashes[self.stop : self.stop + 1]
        served = {job: own for job, own in self.waiting.items() if not after or own[self.stop : self.stop + 1] != after}
        for job in served:
            del self.waiting[job]
        return served


class FileProgress(NamedTuple):
    """Hold what `FileTier.fetch` or `FileTier.on_read` has decided.

    `ready`: the jobs that may start, because they need not wait for a read from files any more. `orders`: the reads
    that the caller must pass to the engine's driver.
    """

    ready: Sequence[JobKey] = ()
    orders: Sequence[ReadFiles] = ()


class FileTier:
    """Decide which blocks are read from files and written to files, and return the reads and writes as effects for the
    engine's driver.

    `pool`: the worker's blocks. `num_read_tokens`: tokens whose KV was read from files since the start.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.num_read_tokens = 0
        self._pool = pool
        self._reads: dict[int, _PrefixRead] = {}
        self._next_read = 1
        self._writing: set[HostSlot] = set()
        self._writes_from = 0.0
        # Seconds that reading a block takes; 0 before the first one.
        self._block_s = 0.0

    # ---- reads

    def fetch(self, job: JobKey, hashes: Sequence[BlockHash], cost: StepCost | None, now: float) -> FileProgress:
        """Begin to read from files those blocks of a prefix that are not cached, or let `job` wait for an open read of
        them. If the job is not to wait, return it as ready.

        `hashes`: block hashes of the prefix, from its first block to the last one that is cached or in a file. `cost`:
        predicts how long computing the blocks would take; None if not known yet.

        A job does not wait if nothing is to be read, if an earlier read is overdue, if reading is expected to take
        longer than computing, or if host memory has no room. `on_tick` releases the jobs that wait for a read when the
        read has lasted as long as `prefix_fetch_limits` allows for a whole fetch, or `MAX_PREFIX_FETCH_S` seconds where
        that is unlimited.
        """
        block_size = self._pool.block_size
        first = self._pool.count_hits(hashes)
        num_blocks = len(hashes) - first
        is_late = any(now >= read.ends_at for read in self._reads.values())
        if num_blocks < 1 or is_late:
            return FileProgress([job])
        for read in self._reads.values():
            if hashes[first] in read.hashes[read.stop :]:
                read.waiting[job] = tuple(hashes)
                return FileProgress()
        if cost is not None and num_blocks * self._block_s > cost.chunk_s(first * block_size, num_blocks * block_size):
            self._block_s *= _FORGETTING
            return FileProgress([job])
        _, limit_s = prefix_fetch_limits(first, len(hashes), block_size, cost)
        ends_at = now + (MAX_PREFIX_FETCH_S if limit_s == math.inf else limit_s)
        prefix = tuple(hashes)
        orders = self._order(_PrefixRead(prefix, first, [], ends_at, {job: prefix}))
        return FileProgress((), orders) if orders else FileProgress([job])

    def on_read(
        self, read_id: int, num_blocks: int, seconds: float, cost: StepCost | None, now: float, *, is_over: bool
    ) -> FileProgress:
        """Cache the next `num_blocks` blocks of the `ReadFiles` with number `read_id`, which were read in `seconds`
        seconds.

        Once the blocks that a job shares with the prefix have arrived, the rest of its own prefix is fetched as by
        `fetch`, where `cost` is explained. `is_over`: no further block of this `ReadFiles` arrives. The result then has
        the `ReadFiles` for the rest of the prefix as well. If no further read is possible or needed, all jobs that wait
        for the prefix are ready.
        """
        read = self._reads[read_id]
        if num_blocks:
            begin = read.num_read
            read.num_read += num_blocks
            self._pool.admit(read.hashes[: read.stop], read.slots[begin : read.num_read])
            self.num_read_tokens += num_blocks * self._pool.block_size
            block_s = seconds / num_blocks
            self._block_s = (self._block_s + block_s) / 2 if self._block_s else block_s
        served = read.take_served()
        has_all = self._pool.count_hits(read.hashes) >= read.stop
        ready: list[JobKey] = []
        orders: list[ReadFiles] = []
        if is_over:
            del self._reads[read_id]
            self._pool.host.unpin(read.slots[read.num_read :])
            if has_all and read.num_read == len(read.slots) and read.waiting:
                orders += self._order(read)
            if not orders:
                ready += read.waiting
        for job, own in served.items():
            rest = self.fetch(job, own, cost, now) if has_all else FileProgress([job])
            ready += rest.ready
            orders += rest.orders
        return FileProgress(ready, orders)

    def drop(self, job: JobKey) -> None:
        """Remove a job that has ended from the jobs that wait for a read."""
        for read in self._reads.values():
            read.waiting.pop(job, None)

    # ---- writes

    def writes(self, now: float) -> list[WriteFiles]:
        """Return the writes to begin now, of blocks in host memory that no file holds.

        At most `MAX_OPEN_WRITES` writes are open at a time. The result is empty for `WRITE_PAUSE_S` seconds after a
        write that failed.
        """
        if now < self._writes_from:
            return []
        writes = self._pool.host.take_writes(MAX_OPEN_WRITES - len(self._writing))
        self._writing.update(slot for slot, _ in writes)
        return [WriteFiles(writes)] if writes else []

    def on_written(self, slot: HostSlot, block_hash: BlockHash, now: float, *, is_done: bool) -> None:
        """Record that the write of the block `block_hash`, which host memory holds in `slot`, has ended.

        `is_done`: whether a file holds the block now. If not, it is written again after `WRITE_PAUSE_S` seconds,
        provided that host memory still holds it then.
        """
        self._writing.remove(slot)
        if is_done:
            self._pool.note_files([block_hash], ())
        else:
            self._pool.host.write_later(slot, block_hash)
            self._writes_from = now + WRITE_PAUSE_S
        self._pool.host.unpin([slot])

    # ---- time and books

    def on_tick(self, now: float) -> list[JobKey]:
        """Release the jobs that have waited for their read for too long, and return them; the reads go on."""
        late: list[JobKey] = []
        for read in self._reads.values():
            if now >= read.ends_at:
                late += read.waiting
                read.waiting.clear()
        return late

    def next_deadline(self) -> float:
        """Return the time before which `on_tick` does nothing; infinity while no job waits."""
        return min((read.ends_at for read in self._reads.values() if read.waiting), default=math.inf)

    @property
    def is_busy(self) -> bool:
        """Return whether a read or a write is open."""
        return bool(self._reads or self._writing)

    def slots(self) -> Iterator[HostSlot]:
        """Iterate over the host slots of open reads and writes, for `BlockPool.check`."""
        yield from self._writing
        for read in self._reads.values():
            yield from read.slots[read.num_read :]

    def waiting_jobs(self) -> Collection[JobKey]:
        """Return the jobs that wait for a read."""
        return [job for read in self._reads.values() for job in read.waiting]

    def __repr__(self) -> str:
        return f"<file tier: {len(self._reads)} reads, {len(self._writing)} writes>"

    def _order(self, read: _PrefixRead) -> list[ReadFiles]:
        """Order the next blocks of a prefix; return nothing where host memory has no room."""
        first = read.stop
        chain = read.hashes[: first + MAX_READ_BLOCKS]
        slots = self._pool.reserve_slots(chain, first)
        if not slots:
            return []
        read.first, read.num_read, read.slots = first, 0, slots
        read_id, self._next_read = self._next_read, self._next_read + 1
        self._reads[read_id] = read
        return [ReadFiles(read_id, chain[first : first + len(slots)], tuple(slots), chain[:first])]
