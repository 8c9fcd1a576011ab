"""Track the waiting jobs whose prompt prefix is fetched from another worker's cache, and the blocks that receive it.

The request to the other worker and the reads happen in the engine and the transfer. A job holds no blocks and keeps no
other job from starting while it waits: the blocks belong to a table of the fetch, which is published and released
before the job may start. The job then shares the blocks like any cached prefix. As recently used blocks they are the
last to be evicted; if they are evicted all the same, the job computes the prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.core.ids import BlockHash, BlockId, JobKey
from tandem.core.request import RemotePrefix, ResumeJob
from tandem.kv.block_pool import BlockTable
from tandem.kv.handoff import MAX_REMOTE_PREFIX_BLOCKS, RemotePrefixRequest
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.state.sequence import Sequence


@dataclass(slots=True)
class _Fetch:
    """One open fetch. The first `request.first_index` blocks of `table` were cached here before; the others are to be
    read."""

    seq: Sequence
    table: BlockTable
    request: RemotePrefixRequest


class RemotePrefixFetches:
    """Own the open fetches of remote prefixes; the only writer of `Sequence.num_remote_prefix_blocks`.

    `num_tokens` counts the tokens whose KV was fetched, since the start.

    A fetch cannot deadlock: it begins only when each running sequence can grow by a block and every reserved pull finds
    its blocks beside it. All blocks that the fetch needs here are allocated at the beginning, its source serves what is
    already cached there, and both ends have deadlines.
    """

    def __init__(self, state: SchedulerState) -> None:
        self.num_tokens = 0
        self._state = state
        self._pool = state.pool
        self._open: dict[JobKey, _Fetch] = {}

    def await_prefix(self, seq: Sequence) -> None:
        """Mark a new sequence that has a remote prefix to fetch: it may not start until the fetch ends or is skipped,
        and until then its prefix counts as cached."""
        hashes = self._hashes(seq)
        if self._pool.count_hits(hashes) < len(hashes):
            seq.may_start = False
            seq.num_remote_prefix_blocks = len(hashes)

    def begin(self, key: JobKey) -> RemotePrefixRequest | None:
        """Allocate the blocks of a fetch and return the request to send. Returns None, and lets the job start, when the
        whole prefix is cached here or there is no room."""
        seq = self._state.by_key[key]
        if seq.may_start:
            return None
        hashes = self._hashes(seq)
        # Blocks that are only in host memory are fetched as well: bringing them back would need a plan.
        num_hits = len(self._pool.cached(hashes))
        num_taken = self._pool.num_free_needed(hashes[:num_hits], len(hashes))
        if num_taken + len(self._state.running) + self._state.num_reserved > self._pool.num_free:
            self.skip(key)
            return None
        fetch = _Fetch(seq, BlockTable(), RemotePrefixRequest(num_hits, tuple(hashes)))
        self._pool.share(fetch.table, hashes[:num_hits])
        grown = self._pool.grow(fetch.table, len(hashes))
        assert grown, "room was counted"
        self._open[key] = fetch
        return fetch.request

    def skip(self, key: JobKey) -> None:
        """Let the job start without its remote prefix; it computes what is not cached here."""
        _let_start(self._state.by_key[key])

    def blocks(self, key: JobKey) -> tuple[BlockId, ...] | None:
        """Return the blocks of an open fetch; None while one that is to be read into is still being copied to host
        memory."""
        blocks, first = self._open[key].table.ids(), self._open[key].request.first_index
        return None if self._pool.is_copied(blocks[first:]) else blocks

    def end(self, key: JobKey, num_ready: int) -> None:
        """End a fetch whose first `num_ready` blocks are present and verified: publish these blocks and let the job
        start."""
        fetch = self._open.pop(key)
        hashes, table = fetch.request.hashes, fetch.table
        self._pool.publish(table, hashes[:num_ready])
        self._pool.release(table)
        self.num_tokens += (num_ready - fetch.request.first_index) * self._pool.block_size
        _let_start(fetch.seq)

    def tables(self) -> Iterator[BlockTable]:
        """Yield the block tables of the open fetches."""
        return (fetch.table for fetch in self._open.values())

    def __contains__(self, key: JobKey) -> bool:
        """Return whether the job with this key has an open fetch."""
        return key in self._open

    def __repr__(self) -> str:
        return f"<{len(self._open)} prefix fetches, {self.num_tokens} tokens read>"

    def _hashes(self, seq: Sequence) -> list[BlockHash]:
        """Return the block hashes of the remote prefix that the job can use."""
        prefix: RemotePrefix | None = None if isinstance(seq.job, ResumeJob) else seq.job.prefix
        if prefix is None or not self._pool.is_caching:
            return []
        return seq.reusable(self._pool.block_size)[: min(prefix.num_blocks, MAX_REMOTE_PREFIX_BLOCKS)]


def _let_start(seq: Sequence) -> None:
    seq.may_start = True
    seq.num_remote_prefix_blocks = 0
