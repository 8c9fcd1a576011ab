"""`python -m loadtest index`: what the prefix index costs gateways, workers and Redis; runs no model.

    python -m loadtest index [--blocks 1000000] [--seconds 20] [--seed 0]

64 workers hold a million blocks. Lookup, memory and hashing are measured in this process; a cold start and the time
from a fact on a worker to its being visible in a gateway go through a Redis server of its own, with the workers'
publishers in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from redis.asyncio import Redis

from loadtest.index_memory import NUM_BLOCKS, NUM_WORKERS, Holdings, forms, hashing, lookups, worker
from loadtest.stats import percentile
from tandem.core.clock import SystemClock
from tandem.core.config import Bytes
from tandem.core.events import BlockEvicted, BlockStored, KVFact
from tandem.core.ids import BlockHash, WorkerRef
from tandem.gateway.prefixes import PrefixIndex
from tandem.kv.prefix_log import PrefixLog
from tandem.kv.prefix_word import name_of
from tandem.routing.prefix_mirror import Entry
from tandem.stores.embedded import EmbeddedServer
from tandem.stores.index_format import Snapshot
from tandem.stores.prefix_index import IndexReader, IndexWriter
from tandem.worker.publisher import Publisher

NAMESPACE = "measured"
PROMPT_BLOCKS = 32
"""Stored at once: a step of 512 tokens."""
STEP_S = 0.1
"""Between two steps of one worker."""
LOOK_S = 0.001
COST_STEPS = 500
GUARD_S = 60.0


class _Fleet:
    """Workers that all live."""

    def workers(self) -> list[WorkerRef]:
        return [worker(number) for number in range(NUM_WORKERS)]

    def cache_root(self, model: str) -> tuple[str, int] | None:
        return None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="loadtest index", description="What the prefix index costs.")
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help="held by all 64 workers together")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the measurement of staleness")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for row in _rows(args.blocks, args.seconds, args.seed):
        sys.stdout.write(row + "\n")
        sys.stdout.flush()
    return 0


def _rows(num_blocks: int, seconds: float, seed: int) -> Iterator[str]:
    yield f"{num_blocks:,} blocks over {NUM_WORKERS} workers"
    yield ""
    yield from lookups(seed, num_blocks)
    yield ""
    yield from forms(seed, num_blocks)
    yield ""
    yield from asyncio.run(hashing(131_072))
    yield ""
    gc.collect()
    with EmbeddedServer.start(memory=Bytes(1 << 30)) as server:
        yield from asyncio.run(_cold_start(server.url, num_blocks, seed))
        yield from asyncio.run(_publish_cost(server.url))
        yield from asyncio.run(_staleness(server.url, seconds))


def _index(url: str) -> PrefixIndex:
    return PrefixIndex(IndexReader(url, NAMESPACE), _Fleet(), 1, SystemClock())


async def _cold_start(url: str, num_blocks: int, seed: int) -> list[str]:
    """A gateway that starts beside workers whose snapshots are in Redis."""
    holdings = Holdings.draw(seed, num_blocks, 4)
    redis = Redis.from_url(url)
    num_bytes = 0
    for number, words in enumerate(holdings.words):
        writer = IndexWriter(url, NAMESPACE, worker(number))
        await writer.write(Snapshot(worker(number).incarnation, 0, len(words), words))
        await writer.close()
    async for key in redis.scan_iter(f"{{{NAMESPACE}:index:w:*"):
        num_bytes += await redis.memory_usage(key, samples=0) or 0
    await redis.aclose()
    index = _index(url)
    began, used = time.perf_counter(), time.process_time()
    await index.start()
    while (gauges := index.gauges())["tandem_prefix_index_blocks"] < num_blocks // NUM_WORKERS * NUM_WORKERS:
        assert time.perf_counter() < began + GUARD_S, f"{index!r} does not become warm"
        await asyncio.sleep(LOOK_S)
    took, used = time.perf_counter() - began, time.process_time() - used
    await index.stop()
    return [
        f"cold start: {took:.2f} s until all blocks are known, {used:.2f} s of it this processor's",
        f"a block of one worker takes {num_bytes / num_blocks:.1f} bytes of Redis's memory in a snapshot, "
        f"{gauges['tandem_prefix_index_bytes'] / num_blocks:.1f} bytes of a gateway's",
    ]


async def _publish_cost(url: str) -> list[str]:
    """Of facts that are told 32 at a time, in microseconds of the worker's event loop and of Redis."""
    redis, rng = Redis.from_url(url), random.Random(0)
    writer = IndexWriter(url, "cost", worker(0))
    log = PrefixLog(1, 1 << 20, 1 << 17)
    steps = [[BlockStored(BlockHash(rng.randbytes(16)), None) for _ in range(PROMPT_BLOCKS)] for _ in range(COST_STEPS)]
    before, used = await _processor(redis), time.process_time()
    for step in steps:
        log.add(step)
        facts = log.waiting(len(step))
        await writer.tell([Entry(worker(0).id, worker(0).incarnation, facts)])
        log.told(facts.end)
    mine, theirs = time.process_time() - used, await _processor(redis) - before
    num_bytes = sum([await redis.memory_usage(key, samples=0) or 0 async for key in redis.scan_iter("{cost:index:*")])
    thousands = COST_STEPS * PROMPT_BLOCKS / 1000
    await writer.close()
    await redis.aclose()
    return [
        f"publishing 1,000 blocks, 32 at a time: {mine / thousands * 1e6:,.0f} us of the worker's event loop, "
        f"{theirs / thousands * 1e6:,.0f} us of Redis; {num_bytes / thousands / 1000:.1f} bytes each in a stream"
    ]


async def _processor(redis: Any) -> float:
    told = await redis.info("cpu")
    return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])


async def _staleness(url: str, seconds: float) -> list[str]:
    """From the moment that a fact is told on a worker to that in which a lookup here would see it."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_publish, args=(url, seconds, theirs))
    process.start()
    index = _index(url)
    await index.start()
    seen: dict[int, float] = {}
    used, began = time.process_time(), time.perf_counter()
    while not ours.poll():
        await asyncio.sleep(LOOK_S)
        _look(index, seen)
    share = (time.process_time() - used) / (time.perf_counter() - began)
    told: list[tuple[int, float]] = ours.recv()
    await index.stop()
    process.join(GUARD_S)
    late = [seen[name] - at for name, at in told if name in seen]
    rate = NUM_WORKERS * PROMPT_BLOCKS * 2 / STEP_S
    return [
        f"staleness: p50 {percentile(late, 0.5) * 1e3:.0f} ms, p99 {percentile(late, 0.99) * 1e3:.0f} ms of "
        f"{len(late)} facts, at {rate:,.0f} facts/s of all workers; the mirror took {share:.0%} of a core"
    ]


def _look(index: PrefixIndex, seen: dict[int, float]) -> None:
    """The first block of each step of the first worker, as it becomes visible."""
    held = index.table.held(worker(0))
    if held is None:
        return
    step = len(seen)
    while held.tier(name := name_of(_block(0, step, 0))):
        seen[name] = time.perf_counter()
        step += 1


def _block(number: int, step: int, place: int) -> BlockHash:
    return BlockHash(random.Random(f"{number} {step} {place}").randbytes(16))


def _publish(url: str, seconds: float, pipe: Connection) -> None:
    pipe.send(asyncio.run(_tell_all(url, seconds)))


async def _tell_all(url: str, seconds: float) -> list[tuple[int, float]]:
    """All workers tell a step of stored and evicted blocks each `STEP_S`; when the first one told which."""
    clock = SystemClock()
    logs = [PrefixLog(1, 1 << 14, 1 << 17) for _ in range(NUM_WORKERS)]
    publishers = [
        Publisher(IndexWriter(url, NAMESPACE, worker(n)), worker(n), log, 1 << 14, clock) for n, log in enumerate(logs)
    ]
    tasks = [asyncio.create_task(publisher.run()) for publisher in publishers]
    tellers = [asyncio.create_task(_tell(n, publisher.told, seconds)) for n, publisher in enumerate(publishers)]
    told = await asyncio.gather(*tellers)
    await asyncio.sleep(1.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return told[0]


async def _tell(number: int, tell: Callable[[Sequence[KVFact]], None], seconds: float) -> list[tuple[int, float]]:
    """Blocks of a step leave with the step after the next."""
    await asyncio.sleep(STEP_S * number / NUM_WORKERS)
    told: list[tuple[int, float]] = []
    earlier: list[list[BlockHash]] = []
    for step in range(int(seconds / STEP_S)):
        blocks = [_block(number, step, place) for place in range(PROMPT_BLOCKS)]
        gone = earlier[step - 2] if step > 1 else []
        earlier.append(blocks)
        await asyncio.sleep(STEP_S)
        told.append((name_of(blocks[0]), time.perf_counter()))
        tell([*(BlockEvicted(block) for block in gone), *(BlockStored(block, None) for block in blocks)])
    return told
