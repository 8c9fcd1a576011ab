"""Run 64 workers that publish stored and evicted blocks from a process of their own, as real workers do."""

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
"""Number of blocks stored at once: a step of 512 tokens."""
STEP_S = 0.1
"""Seconds between two steps of one worker."""
FACTS_PER_S = NUM_WORKERS * PROMPT_BLOCKS * 2 / STEP_S
_KEPT_STEPS = 30
_SPREAD_S = 1.0
"""Seconds to wait after the last step for facts still in transit."""
_END_S = 30.0


class IndexPublishers:
    """Run 64 workers that publish KV events for `seconds` seconds, in a child process."""

    def __init__(self, url: str, seconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_publish, args=(url, seconds, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def has_ended(self) -> bool:
        return self._ours.poll()

    def published_at(self) -> list[list[float]]:
        """Return when each worker published each of its steps, on the clock of `time.perf_counter`.

        Raises EOFError when the process has failed.
        """
        published_s: list[list[float]] = self._ours.recv()
        self._process.join(_END_S)
        return published_s


def first_name(number: int, step: int) -> int:
    """Return the short hash of the first block that worker `number` stores in a step."""
    return short_hash(_block(number, step, 0))


def _block(number: int, step: int, place: int) -> BlockHash:
    return BlockHash(hashlib.blake2b(f"{number} {step} {place}".encode(), digest_size=16).digest())


def _publish(url: str, seconds: float, pipe: Connection) -> None:
    pipe.send(asyncio.run(_publish_all(url, seconds)))


async def _publish_all(url: str, seconds: float) -> list[list[float]]:
    clock = SystemClock()
    logs = [KVEventLog(1, 1 << 14, 1 << 17) for _ in range(NUM_WORKERS)]
    publishers = [
        KVEventPublisher(IndexWriter(url, NAMESPACE, worker(n)), worker(n), log, 1 << 14, clock)
        for n, log in enumerate(logs)
    ]
    tasks = [asyncio.create_task(publisher.run()) for publisher in publishers]
    writers = [
        asyncio.create_task(_publish_steps(n, publisher.on_kv_events, seconds))
        for n, publisher in enumerate(publishers)
    ]
    published_s = await asyncio.gather(*writers)
    await asyncio.sleep(_SPREAD_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return list(published_s)


async def _publish_steps(number: int, publish: Callable[[Sequence[KVFact]], None], seconds: float) -> list[float]:
    """Publish steps until the time is over. Blocks of a step are evicted `_KEPT_STEPS` steps later."""
    await asyncio.sleep(STEP_S * number / NUM_WORKERS)
    published_s: list[float] = []
    earlier: list[list[BlockHash]] = []
    for step in range(int(seconds / STEP_S)):
        blocks = [_block(number, step, place) for place in range(PROMPT_BLOCKS)]
        gone = earlier[step - _KEPT_STEPS] if step >= _KEPT_STEPS else []
        earlier.append(blocks)
        await asyncio.sleep(STEP_S)
        published_s.append(time.perf_counter())
        publish([*(BlockEvicted(block) for block in gone), *(BlockStored(block, None) for block in blocks)])
    return published_s
