"""64 workers that tell of stored and evicted blocks in a process of their own, as the real ones do; reads nothing."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from loadtest.cluster.index_memory import NUM_WORKERS, worker
from tandem.core.clock import SystemClock
from tandem.core.events import BlockEvicted, BlockStored, KVFact
from tandem.core.ids import BlockHash
from tandem.kv.kv_event_codec import short_hash
from tandem.kv.kv_event_log import KVEventLog
from tandem.stores.prefix_index import IndexWriter
from tandem.worker.gateways.kv_event_publisher import KVEventPublisher

NAMESPACE = "measured"
PROMPT_BLOCKS = 32
"""Stored at once: a step of 512 tokens."""
STEP_S = 0.1
"""Between two steps of one worker."""
FACTS_PER_S = NUM_WORKERS * PROMPT_BLOCKS * 2 / STEP_S
_KEPT_STEPS = 30
_SPREAD_S = 1.0
"""After the last step, for what is on its way."""
_END_S = 30.0


class IndexPublishers:
    """One run of them, of so many seconds."""

    def __init__(self, url: str, seconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_publish, args=(url, seconds, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def has_ended(self) -> bool:
        return self._ours.poll()

    def told(self) -> list[list[float]]:
        """When each worker told of each of its steps, on the clock of `time.perf_counter`. Raises EOFError when the
        process has failed."""
        told: list[list[float]] = self._ours.recv()
        self._process.join(_END_S)
        return told


def first_name(number: int, step: int) -> int:
    """Of the first block that a worker stores in a step."""
    return short_hash(_block(number, step, 0))


def _block(number: int, step: int, place: int) -> BlockHash:
    return BlockHash(hashlib.blake2b(f"{number} {step} {place}".encode(), digest_size=16).digest())


def _publish(url: str, seconds: float, pipe: Connection) -> None:
    pipe.send(asyncio.run(_tell_all(url, seconds)))


async def _tell_all(url: str, seconds: float) -> list[list[float]]:
    clock = SystemClock()
    logs = [KVEventLog(1, 1 << 14, 1 << 17) for _ in range(NUM_WORKERS)]
    publishers = [
        KVEventPublisher(IndexWriter(url, NAMESPACE, worker(n)), worker(n), log, 1 << 14, clock)
        for n, log in enumerate(logs)
    ]
    tasks = [asyncio.create_task(publisher.run()) for publisher in publishers]
    tellers = [asyncio.create_task(_tell(n, publisher.on_kv_events, seconds)) for n, publisher in enumerate(publishers)]
    told = await asyncio.gather(*tellers)
    await asyncio.sleep(_SPREAD_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return list(told)


async def _tell(number: int, tell: Callable[[Sequence[KVFact]], None], seconds: float) -> list[float]:
    """Blocks of a step leave `_KEPT_STEPS` later."""
    await asyncio.sleep(STEP_S * number / NUM_WORKERS)
    told: list[float] = []
    earlier: list[list[BlockHash]] = []
    for step in range(int(seconds / STEP_S)):
        blocks = [_block(number, step, place) for place in range(PROMPT_BLOCKS)]
        gone = earlier[step - _KEPT_STEPS] if step >= _KEPT_STEPS else []
        earlier.append(blocks)
        await asyncio.sleep(STEP_S)
        told.append(time.perf_counter())
        tell([*(BlockEvicted(block) for block in gone), *(BlockStored(block, None) for block in blocks)])
    return told
