"""Which waiting jobs wait for a prefix from another worker's cache, and the blocks that it is read into; never asks for
one and never reads.

Such a job holds nothing and takes nobody's place: the blocks belong to a table of its borrowing, which is given back,
with names, before the job may start. Then it shares them like any prefix. They are those that are reused last; should
they be gone by then, they are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass

from tandem.core.ids import BlockHash, BlockId, JobKey, SeqId
from tandem.core.request import RemotePrefix, ResumeJob
from tandem.kv.block_pool import BlockPool, BlockTable
from tandem.kv.handoff import MAX_REMOTE_PREFIX_BLOCKS, RemotePrefixRequest
from tandem.sched.state.sequence import Sequence


@dataclass(slots=True)
class _Fetch:
    """`wanted.first_index` blocks of the table held their content before, the others are to be read."""

    seq: Sequence
    table: BlockTable
    wanted: RemotePrefixRequest


class RemotePrefixFetches:
    """The only writer of `Sequence.num_awaited`. `num_tokens`: whose KV was read, since the start.

    A borrowing takes nobody's room: it begins only where what runs may grow by a block each, and every pull that was
    promised room gets it, beside it. So whoever waits for room never waits for a borrowing that waits for somebody: all
    that it needs here it has from the beginning, its source lends what it holds, and both ends of it have deadlines.
    """

    def __init__(
        self, pool: BlockPool, running: Sized, promised: Mapping[SeqId, int], by_key: Mapping[JobKey, Sequence]
    ) -> None:
        self.num_tokens = 0
        self._pool = pool
        self._running = running
        self._promised = promised
        self._by_key = by_key
        self._open: dict[JobKey, _Fetch] = {}

    def expect(self, seq: Sequence) -> None:
        """A sequence comes: until its borrowing begins or is waived it counts as if that went well."""
        hashes = self._hashes(seq)
        if self._pool.count_hits(hashes) < len(hashes):
            seq.may_start, seq.num_remote_prefix_blocks = False, len(hashes)

    def begin(self, key: JobKey) -> RemotePrefixRequest | None:
        """What is to be asked for; None, and the job may start, where all is here or there is no room."""
        seq = self._by_key[key]
        if seq.may_start:
            return None
        hashes = self._hashes(seq)
        # What only host memory has is read as well: bringing it back would be a plan's work.
        num_hits = len(self._pool.cached(hashes))
        num_taken = self._pool.num_free_needed(hashes[:num_hits], len(hashes))
        if num_taken + len(self._running) + sum(self._promised.values()) > self._pool.num_free:
            self.skip(key)
            return None
        borrowing = _Fetch(seq, BlockTable(), RemotePrefixRequest(num_hits, tuple(hashes)))
        self._pool.share(borrowing.table, hashes[:num_hits])
        grown = self._pool.grow(borrowing.table, len(hashes))
        assert grown, "room was counted"
        self._open[key] = borrowing
        return borrowing.wanted

    def skip(self, key: JobKey) -> None:
        """The job may start, and computes what is not here."""
        _may_start(self._by_key[key])

    def blocks(self, key: JobKey) -> tuple[BlockId, ...] | None:
        """Of an open borrowing, once none of those that are to be read is still to be copied to host memory."""
        blocks, first = self._open[key].table.ids(), self._open[key].wanted.first_index
        return None if self._pool.is_copied(blocks[first:]) else blocks

    def end(self, key: JobKey, num_ready: int) -> None:
        """The first `num_ready` blocks are here and checked: they can be found from now on, and the job may start."""
        borrowing = self._open.pop(key)
        hashes, table = borrowing.wanted.hashes, borrowing.table
        self._pool.publish(table, hashes[:num_ready])
        self._pool.release(table)
        self.num_tokens += (num_ready - borrowing.wanted.first_index) * self._pool.block_size
        _may_start(borrowing.seq)

    def tables(self) -> Iterator[BlockTable]:
        return (borrowing.table for borrowing in self._open.values())

    def __contains__(self, key: JobKey) -> bool:
        """The job that goes by this key borrows."""
        return key in self._open

    def __repr__(self) -> str:
        return f"<{len(self._open)} prefix fetches, {self.num_tokens} tokens read>"

    def _hashes(self, seq: Sequence) -> list[BlockHash]:
        """Of the prefix that its job is to read, as far as that can be of use."""
        prefix: RemotePrefix | None = None if isinstance(seq.job, ResumeJob) else seq.job.prefix
        if prefix is None or not self._pool.is_caching:
            return []
        return seq.reusable(self._pool.block_size)[: min(prefix.num_blocks, MAX_REMOTE_PREFIX_BLOCKS)]


def _may_start(seq: Sequence) -> None:
    seq.may_start, seq.num_remote_prefix_blocks = True, 0
