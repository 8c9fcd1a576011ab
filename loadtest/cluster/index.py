"""Measure what the prefix index costs gateways, workers and Redis: `python -m loadtest index`.

    python -m loadtest index [--blocks 1000000] [--seconds 10] [--seed 0]

64 workers hold a million blocks. Lookup, memory and hashing are measured in this process; a cold start and the time
from a KV event on a worker to its visibility in a gateway go through a Redis server of its own, with the workers'
publishers in another process. `--seconds` is the duration for each of three ways to read the index.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
from collections.abc import Iterator, Sequence

from redis.asyncio import Redis

from loadtest.cluster.index_memory import NUM_BLOCKS, NUM_WORKERS, Holdings, forms, hashing, lookups, worker
from loadtest.cluster.index_publishers import NAMESPACE, PROMPT_BLOCKS
from loadtest.cluster.index_reads import IndexedWorkers, processor, read_modes
from tandem.core.clock import SystemClock
from tandem.core.config import Bytes
from tandem.core.events import BlockStored
from tandem.core.ids import BlockHash
from tandem.gateway.prefix.prefix_index_client import PrefixIndexClient
from tandem.kv.kv_event_log import KVEventLog
from tandem.routing.kv_indexer import WorkerKVEvents
from tandem.stores.embedded_redis import EmbeddedServer
from tandem.stores.prefix_index import IndexReader, IndexSnapshot, IndexWriter

LOOK_S = 0.001
COST_STEPS = 500
GUARD_S = 60.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="loadtest index", description="What the prefix index costs.")
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help="held by all 64 workers together")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the measurement of each way to read")
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
        yield ""
        yield from read_modes(server.url, seconds)


def _index(url: str) -> PrefixIndexClient:
    return PrefixIndexClient(IndexReader(url, NAMESPACE), IndexedWorkers(), 1, SystemClock())


async def _cold_start(url: str, num_blocks: int, seed: int) -> list[str]:
    """Measure a gateway that starts beside workers whose snapshots are in Redis."""
    holdings = Holdings.sample(seed, num_blocks, 4)
    redis = Redis.from_url(url)
    num_bytes = 0
    for number, words in enumerate(holdings.words):
        writer = IndexWriter(url, NAMESPACE, worker(number))
        await writer.write(IndexSnapshot(worker(number).incarnation, 0, len(words), words))
        await writer.close()
    async for key in redis.scan_iter(f"{{{NAMESPACE}:index:w:*"):
        num_bytes += await redis.memory_usage(key, samples=0) or 0
    await redis.aclose()
    index = _index(url)
    began, used = time.perf_counter(), time.process_time()
    await index.start()
    while index.table.num_blocks < num_blocks // NUM_WORKERS * NUM_WORKERS:
        assert time.perf_counter() < began + GUARD_S, f"{index!r} does not become warm"
        await asyncio.sleep(LOOK_S)
    took, used = time.perf_counter() - began, time.process_time() - used
    await index.stop()
    return [
        f"cold start: {took:.2f} s until all blocks are known, {used:.2f} s of it this processor's",
        f"a block of one worker takes {num_bytes / num_blocks:.1f} bytes of Redis's memory in a snapshot, "
        f"{index.table.num_bytes / num_blocks:.1f} bytes of a gateway's",
    ]


async def _publish_cost(url: str) -> list[str]:
    """Measure facts that are published 32 at a time, in microseconds of the worker's event loop and of Redis."""
    redis, rng = Redis.from_url(url), random.Random(0)
    writer = IndexWriter(url, "cost", worker(0))
    log = KVEventLog(1, 1 << 20, 1 << 17)
    steps = [[BlockStored(BlockHash(rng.randbytes(16)), None) for _ in range(PROMPT_BLOCKS)] for _ in range(COST_STEPS)]
    before, used = await processor(redis), time.process_time()
    for step in steps:
        log.add(step)
        facts = log.waiting(len(step))
        await writer.append([WorkerKVEvents(worker(0).id, worker(0).incarnation, facts)])
        log.acknowledge(facts.end)
    mine, theirs = time.process_time() - used, await processor(redis) - before
    num_bytes = sum([await redis.memory_usage(key, samples=0) or 0 async for key in redis.scan_iter("{cost:index:*")])
    thousands = COST_STEPS * PROMPT_BLOCKS / 1000
    await writer.close()
    await redis.aclose()
    return [
        f"publishing 1,000 blocks, 32 at a time: {mine / thousands * 1e6:,.0f} us of the worker's event loop, "
        f"{theirs / thousands * 1e6:,.0f} us of Redis; {num_bytes / thousands / 1000:.1f} bytes each in a stream"
    ]
