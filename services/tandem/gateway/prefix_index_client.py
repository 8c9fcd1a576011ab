"""A gateway's mirror of the prefix index: follows it in Redis and answers from memory; never decides what is mirrored.

It polls: a poll takes in what all shards have come to, where a blocking read of each shard wakes it for nearly every
entry, which costs half as much again (`python -m loadtest index`). Redis down: it goes on with what it has, says so,
and begins again with the oldest entries once Redis answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from tandem.core.clock import Clock
from tandem.core.ids import BlockHash, WorkerRef
from tandem.core.request import Request
from tandem.gateway.block_hashes import hash_prompt_blocks
from tandem.gateway.supervise import log_and_continue
from tandem.kv.compact_block_set import CompactBlockSet
from tandem.routing.kv_indexer import KVIndexer, WorkerKVEvents
from tandem.routing.placement import Placement
from tandem.routing.prefix_accuracy import Prediction, PrefixAccuracy, predict
from tandem.routing.prefix_index import PrefixHit, PrefixTable
from tandem.stores.index_format import IndexSnapshot
from tandem.stores.prefix_index import IndexReader, IndexUnavailable

POLL_S = 0.025
RETRY_S = 0.25
"""Until a snapshot that was not there, or was too old, is looked for again; and Redis, after an error."""
TURN_WORDS = 2048
"""Taken in during one turn of the event loop: a millisecond."""
_log = logging.getLogger(__name__)


class PrefixIndexScope(Protocol):
    """Whose blocks the index is about."""

    def workers(self) -> Collection[WorkerRef]:
        """Who lives, now."""
        ...

    def cache_root(self, model: str) -> tuple[str, int] | None:
        """What the names of a model's blocks depend on: fingerprint and block size; None while nobody serves it."""
        ...


class PrefixIndexClient:
    """Owns `reader` and closes it. `is_reachable` and `false_hits` are to be read only."""

    def __init__(self, reader: IndexReader, fleet: PrefixIndexScope, stride: int, clock: Clock) -> None:
        self._reader = reader
        self._fleet = fleet
        self._clock = clock
        self._mirror = KVIndexer(PrefixTable(stride))
        self.false_hits = PrefixAccuracy()
        self._load_at = 0.0
        self.is_reachable = True
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._follow_forever(), name="prefix-index")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._reader.close()

    # ---- what is known

    @property
    def table(self) -> PrefixTable:
        """To be read only."""
        return self._mirror.table

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerRef, PrefixHit]:
        """As `PrefixTable.match`."""
        return self._mirror.table.match(hashes)

    async def name(self, request: Request) -> Sequence[BlockHash]:
        """What the prompt's full blocks are called; nothing where no worker serves the model. Where workers serve it
        in two builds the names are those of `cache_root`: the other build's workers count as holding nothing."""
        root = self._fleet.cache_root(request.model)
        return () if root is None else await hash_prompt_blocks(request, *root)

    def predict(self, request: Request, placement: Placement, num_hit_blocks: int) -> Sequence[Prediction]:
        """What the worker that computes a prompt has of it, which are so many leading blocks, and what it is to read
        from another beyond these."""
        hits = [(placement.prefill, num_hit_blocks, 0)]
        if placement.prefix is not None:
            hits.append((*placement.prefix, num_hit_blocks))
        root = self._fleet.cache_root(request.model)
        if root is None:
            return ()
        num_prompt = len(request.prompt_tokens)
        return [predict(worker, num, num_prompt, root[1], before) for worker, num, before in hits if num]

    def reported(self, predicted: Prediction, num_cached: int) -> None:
        """How many tokens of a prompt were not computed, against those that were predicted."""
        if self.false_hits.reported(predicted, num_cached):
            _log.warning("%s holds less than the prefix index says; its entries are loaded again", predicted.worker)
            self._mirror.suspect(predicted.worker)

    @property
    def num_wanted(self) -> int:
        """Workers whose blocks are to be loaded again."""
        return len(self._mirror.missing_snapshots())

    # ---- the task

    async def _follow_forever(self) -> None:
        while True:
            async with log_and_continue("the look at the prefix index"):
                if not await self.follow():
                    await asyncio.sleep(POLL_S if self.is_reachable else RETRY_S)

    async def follow(self) -> bool:
        """One look at what is new. True: there is more already."""
        try:
            has_more = await self._follow()
            self.is_reachable = True
        except IndexUnavailable:
            self.is_reachable = False
            return False
        return has_more

    async def _follow(self) -> bool:
        for gone in self._mirror.set_workers(self._fleet.workers()):
            self.false_hits.forget(gone)
        entries, has_more = await self._reader.read()
        await self._take(entries)
        now = self._clock.now()
        if now >= self._load_at:
            self._load_at = now + RETRY_S
            for worker, least in self._mirror.missing_snapshots():
                await self._load(worker, least)
        return has_more

    async def _take(self, entries: Sequence[WorkerKVEvents]) -> None:
        num_words = 0
        for entry in entries:
            self._mirror.take(entry)
            num_words += len(entry.facts.words)
            if num_words >= TURN_WORDS:
                num_words = 0
                await asyncio.sleep(0)

    async def _load(self, worker: WorkerRef, least: int) -> None:
        """A worker's snapshot where it will do, else ask for one that will."""
        snapshot = await self._reader.snapshot(worker.id)
        if snapshot is not None and snapshot.incarnation == worker.incarnation and snapshot.number >= least:
            self._mirror.load(worker, snapshot.number, await _held(snapshot))
        else:
            await self._reader.want(worker, least)

    def __repr__(self) -> str:
        return f"<prefix index {'reachable' if self.is_reachable else 'unreachable'}: {self._mirror!r}>"


async def _held(snapshot: IndexSnapshot) -> CompactBlockSet:
    """With room for all that the worker can hold, so that it never grows."""
    held = CompactBlockSet(max(snapshot.capacity, len(snapshot.words)))
    for start in range(0, len(snapshot.words), TURN_WORDS):
        held.write(snapshot.words[start : start + TURN_WORDS])
        await asyncio.sleep(0)
    return held
