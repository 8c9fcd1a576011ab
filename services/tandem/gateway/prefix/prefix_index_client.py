"""Mirror the prefix index: follow its entries in Redis, and look prefixes up in memory.

The client polls: one poll reads what all shards have published. A blocking read of each shard would wake the client for
nearly every entry, which costs half as much again (`python -m loadtest index`). While Redis is down, the mirror stays
as it is (`is_reachable` is false). When Redis is back, the client reads on from the oldest entries that exist, because
another server may answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from tandem.core.clock import Clock
from tandem.core.ids import BlockHash, WorkerRef
from tandem.core.request import Request
from tandem.gateway.context.supervise import BackgroundLoop
from tandem.kv.compact_block_set import CompactBlockSet
from tandem.kv.hashing import chain_hashes, prompt_hashes, root_hash
from tandem.routing.kv_indexer import KVIndexer, WorkerKVEvents
from tandem.routing.prefix_accuracy import Prediction, PrefixAccuracy
from tandem.routing.prefix_index import PrefixHit, PrefixTable
from tandem.stores.prefix_index import IndexReader, IndexSnapshot
from tandem.stores.redis_client import StoreUnavailable

POLL_S = 0.025
RETRY_S = 0.25
"""Seconds between two attempts to load a snapshot that was missing or too old, and to reach Redis after an error."""
TURN_WORDS = 2048
"""Words (one per KV event or block) processed before other tasks may run: a millisecond."""
SLICE_TOKENS = 4096
"""Number of tokens hashed before other tasks may run, a multiple of every block size. A slice stalls the event loop for
0.4 ms; slices of 1024 tokens would stall it for 0.2 ms and take a tenth longer in total."""
_log = logging.getLogger(__name__)


class PrefixIndexScope(Protocol):
    """Select which workers and models the mirror covers."""

    def workers(self) -> Collection[WorkerRef]:
        """Return the workers whose blocks the mirror keeps; those of other workers are dropped."""
        ...

    def cache_root(self, model: str) -> tuple[str, int] | None:
        """Return what the block hashes of a model depend on besides tokens and salt: its fingerprint, and the block
        size in tokens. None while no worker serves the model."""
        ...


class PrefixIndexClient:
    """Keep a copy of the prefix index in memory, up to date with Redis, and look up prefixes in it.

    `reader`: reads the index from Redis; this object closes it in `stop`. `scope`: selects the workers and models that
    the copy covers. `stride`: only every `stride`-th block of a prompt is kept, so hits are multiples of `stride`
    blocks. `table`: the blocks that each worker caches. `is_reachable`: whether the last read of Redis succeeded.
    `false_hits`: counts the prompt tokens that were predicted to be cached on a worker, and those of them that were
    not. Callers must not change these three attributes.
    """

    def __init__(self, reader: IndexReader, scope: PrefixIndexScope, stride: int, clock: Clock) -> None:
        self._reader = reader
        self._scope = scope
        self._clock = clock
        self.table = PrefixTable(stride)
        self._mirror = KVIndexer(self.table)
        self.false_hits = PrefixAccuracy()
        self._load_at = 0.0
        self.is_reachable = True
        self._loop = BackgroundLoop("following the prefix index", self._step)
        self.start = self._loop.start

    async def stop(self) -> None:
        await self._loop.stop()
        await self._reader.close()

    # ---- lookups

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerRef, PrefixHit]:
        """Return how many leading blocks of a prompt each worker holds; workers that hold none are left out.

        `hashes`: the hashes of the prompt's blocks, in order.
        """
        return self.table.match(hashes)

    async def name(self, request: Request) -> Sequence[BlockHash]:
        """Return the hashes by which the prefix index names the full blocks of the request's prompt, in order; empty
        where no worker serves the model.

        While workers of two builds serve the model, the hashes are those of the build that `cache_root` returns, and
        workers of the other build have no hits."""
        root = self._scope.cache_root(request.model)
        return () if root is None else await hash_prompt_blocks(request, *root)

    def reported(self, predicted: Prediction, num_cached: int) -> None:
        """Compare the predicted prefix hit of a request with `num_cached`, the prompt tokens that its worker found in a
        cache.

        The blocks of a worker that repeatedly has fewer than predicted are loaded again from its snapshot."""
        if self.false_hits.reported(predicted, num_cached):
            message = "worker %s has fewer cached blocks than the prefix index lists; the gateway loads them again"
            _log.info(message, predicted.worker)
            self._mirror.suspect(predicted.worker)

    @property
    def num_unloaded_workers(self) -> int:
        """Return how many live workers have blocks that the mirror still has to load from a snapshot."""
        return len(self._mirror.missing_snapshots())

    # ---- the task

    async def _step(self) -> float:
        if await self.follow():
            return 0.0
        return POLL_S if self.is_reachable else RETRY_S

    async def follow(self) -> bool:
        """Read the entries that Redis has now and apply them; return whether more are waiting in Redis.

        Returns False also where Redis is unreachable.
        """
        try:
            has_more = await self._follow()
            self.is_reachable = True
        except StoreUnavailable:
            self.is_reachable = False
            return False
        return has_more

    async def _follow(self) -> bool:
        for gone in self._mirror.set_workers(self._scope.workers()):
            self.false_hits.forget(gone)
        entries, has_more = await self._reader.read()
        await self._take(entries)
        now = self._clock.now()
        if now >= self._load_at:
            self._load_at = now + RETRY_S
            for worker, min_number in self._mirror.missing_snapshots():
                await self._load(worker, min_number)
        return has_more

    async def _take(self, entries: Sequence[WorkerKVEvents]) -> None:
        num_words = 0
        for entry in entries:
            self._mirror.take(entry)
            num_words += len(entry.facts.words)
            if num_words >= TURN_WORDS:
                num_words = 0
                await asyncio.sleep(0)

    async def _load(self, worker: WorkerRef, min_number: int) -> None:
        """Load a worker's snapshot where it covers the first `min_number` facts, else request a newer one."""
        snapshot = await self._reader.snapshot(worker.id)
        if snapshot is not None and snapshot.incarnation == worker.incarnation and snapshot.number >= min_number:
            self._mirror.load(worker, snapshot.number, await _read_blocks(snapshot))
        else:
            await self._reader.request_snapshot(worker, min_number)


async def _read_blocks(snapshot: IndexSnapshot) -> CompactBlockSet:
    """Return the blocks of a snapshot, with room for all that the worker can hold, so that the set does not grow
    later."""
    blocks = CompactBlockSet(max(snapshot.capacity, len(snapshot.words)))
    for start in range(0, len(snapshot.words), TURN_WORDS):
        blocks.write(snapshot.words[start : start + TURN_WORDS])
        await asyncio.sleep(0)
    return blocks


async def hash_prompt_blocks(request: Request, model_fingerprint: str, block_size: int) -> tuple[BlockHash, ...]:
    """Return the hashes of the prompt's full blocks in order, and store them in the request, so that a second call
    computes nothing.

    `model_fingerprint` and `block_size` (in tokens) are those of the workers that serve the model. Other tasks run
    while a long prompt is hashed.

    Hashing takes some 60 ns per token and holds the GIL all the while, because a block is too short for `hashlib` to
    release it: a thread stalls the event loop as long as hashing on it would (`python -m loadtest index`). So a long
    prompt is hashed on the event loop in pieces, each of which continues from the last hash of the piece before, and
    other tasks run between two pieces."""
    root = root_hash(model_fingerprint, block_size, request.cache_salt)
    tokens = request.prompt_tokens
    if len(tokens) <= SLICE_TOKENS or (root, block_size) in request.block_names:
        return prompt_hashes(root, request, block_size)
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(tokens), SLICE_TOKENS):
        hashes += chain_hashes(parent, tokens[start : start + SLICE_TOKENS], block_size)
        parent = hashes[-1]
        await asyncio.sleep(0)
    request.block_names[root, block_size] = tuple(hashes)
    return request.block_names[root, block_size]
