"""Decide which prefixes are read from files and which blocks are written to them, and which jobs wait for it.

A block is written once it is in host memory, and read into host memory, from which a prefix hit copies it to the
device. A file that is missing, incomplete or changed ends the read before it; the job then computes the rest.
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
"""Most blocks of one order to the files. A longer prefix takes several, so that no read holds all of host memory and
what nobody waits for any more is not read to its end."""
MAX_OPEN_WRITES = 32
"""Most blocks that wait to be written at the same time. Their slots of host memory cannot be reused."""
WRITE_PAUSE_S = 10.0
"""Seconds without a write after one that failed, as on a full disk."""
_FORGETTING = 0.9
"""Factor on the estimated duration of a read each time that it kept a prefix from being read, so that it is tried again
some time."""


@dataclass(eq=False, slots=True)
class _PrefixRead:
    """A read of blocks of the prefix `hashes`, in one order after the other. `slots`: those of the open order, which
    begins at block `first` and of which `num_read` blocks have arrived. `waiting`: the jobs that wait for it, until
    `ends_at`."""

    hashes: tuple[BlockHash, ...]
    first: int
    slots: list[HostSlot]
    ends_at: float
    waiting: list[JobKey] = field(default_factory=list)
    num_read: int = 0

    @property
    def stop(self) -> int:
        """Return the index of the first block that has not arrived."""
        return self.first + self.num_read


class FileProgress(NamedTuple):
    """Jobs that need not wait any more, and further blocks to read."""

    ready: Sequence[JobKey] = ()
    orders: Sequence[ReadFiles] = ()


class FileTier:
    """Decide which blocks are read from files and written to files; who drives the engine carries the effects out.

    `num_read_tokens`: tokens whose KV was read from files since the start.
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
        """Begin to read the blocks of `hashes` that are not cached, or wait for a read of them that is open; return the
        job as ready, without a change, if it is not to wait.

        `cost`: predicts how long computing the blocks would take; where reading takes longer, they are not read, and
        the job stops waiting. None if not known yet.
        """
        block_size = self._pool.block_size
        first = self._pool.count_hits(hashes)
        num_blocks = len(hashes) - first
        is_late = any(now >= read.ends_at for read in self._reads.values())
        if num_blocks < 1 or is_late:
            return FileProgress([job])
        for read in self._reads.values():
            if hashes[first] in read.hashes[read.stop :]:
                read.waiting.append(job)
                return FileProgress()
        if cost is not None and num_blocks * self._block_s > cost.chunk_s(first * block_size, num_blocks * block_size):
            self._block_s *= _FORGETTING
            return FileProgress([job])
        _, limit_s = prefix_fetch_limits(first, len(hashes), block_size, cost)
        ends_at = now + (MAX_PREFIX_FETCH_S if limit_s == math.inf else limit_s)
        orders = self._order(_PrefixRead(tuple(hashes), first, [], ends_at, [job]))
        return FileProgress((), orders) if orders else FileProgress([job])

    def on_read(self, read_id: int, num_blocks: int, seconds: float, *, is_over: bool) -> FileProgress:
        """Cache the next `num_blocks` blocks of an order, which have arrived and took `seconds`. With `is_over` no
        further block of it arrives."""
        read = self._reads[read_id]
        if num_blocks:
            begin = read.num_read
            read.num_read += num_blocks
            self._pool.admit(read.hashes[: read.stop], read.slots[begin : read.num_read])
            self.num_read_tokens += num_blocks * self._pool.block_size
            block_s = seconds / num_blocks
            self._block_s = (self._block_s + block_s) / 2 if self._block_s else block_s
        if not is_over:
            return FileProgress()
        del self._reads[read_id]
        self._pool.host.unpin(read.slots[read.num_read :])
        is_useful = read.num_read == len(read.slots) and self._pool.count_hits(read.hashes) >= read.stop
        orders = self._order(read) if is_useful and read.waiting and read.stop < len(read.hashes) else ()
        return FileProgress((), orders) if orders else FileProgress(read.waiting)

    def drop(self, job: JobKey) -> None:
        """Forget a job that has ended."""
        for read in self._reads.values():
            if job in read.waiting:
                read.waiting.remove(job)

    # ---- writes

    def writes(self, now: float) -> list[WriteFiles]:
        """Return the blocks to write now: those of host memory that no file has, as many as may be open."""
        if now < self._writes_from:
            return []
        writes = self._pool.host.take_writes(MAX_OPEN_WRITES - len(self._writing))
        self._writing.update(slot for slot, _ in writes)
        return [WriteFiles(writes)] if writes else []

    def on_written(self, slot: HostSlot, block_hash: BlockHash, now: float, *, is_done: bool) -> None:
        """Record the end of the write of a block. `is_done`: a file holds it now; otherwise it is tried again after
        `WRITE_PAUSE_S`."""
        self._writing.remove(slot)
        if is_done:
            self._pool.note_files([block_hash], ())
        else:
            self._pool.host.write_later(slot, block_hash)
            self._writes_from = now + WRITE_PAUSE_S
        self._pool.host.unpin([slot])

    # ---- time and books

    def on_tick(self, now: float) -> list[JobKey]:
        """Return the jobs that have waited for too long."""
        late: list[JobKey] = []
        for read in self._reads.values():
            if now >= read.ends_at:
                late += read.waiting
                read.waiting.clear()
        return late

    def next_deadline(self) -> float:
        """Return the time before which `on_tick` does nothing."""
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
