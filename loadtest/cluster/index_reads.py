"""Measure how late a gateway sees KV events and what reading them costs, for three ways to read the shards of the
index."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from loadtest.cluster.index_memory import NUM_WORKERS, worker
from loadtest.cluster.index_publishers import FACTS_PER_S, NAMESPACE, IndexPublishers, first_name
from loadtest.common.stats import percentile
from tandem.core.clock import SystemClock
from tandem.core.ids import WorkerRef
from tandem.gateway.prefix.prefix_index_client import PrefixIndexClient
from tandem.routing.kv_indexer import KVIndexer
from tandem.routing.prefix_index import PrefixTable
from tandem.stores.prefix_index import NUM_SHARDS, READ_ENTRIES, IndexReader, unpack_entry

LOOK_S = 0.002
"""Seconds between two checks whether a fact is visible, which is the resolution of the staleness."""
NUM_LOOKED_AT = 8
"""Number of workers whose facts are checked."""
BLOCK_MS = 1000

Reading = Callable[[str], AbstractAsyncContextManager[PrefixTable]]
"""Opens a table that is kept up to date with what is published at a Redis URL."""


class IndexedWorkers:
    """View of the worker registry in which all workers are alive."""

    def workers(self) -> list[WorkerRef]:
        return [worker(number) for number in range(NUM_WORKERS)]

    def cache_root(self, model: str) -> tuple[str, int] | None:
        return None


def read_modes(url: str, seconds: float) -> Iterator[str]:
    """Yield Markdown rows with the staleness and the cost of each way to read.

    A gateway's share of a core includes the checks of the table, Redis's share includes the workers' writes.
    """
    yield f"| reading, at {FACTS_PER_S:,.0f} facts/s | staleness p50 ms | p99 ms | facts | XREAD/s | gateway | Redis |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    readings = {
        "polling (what gateways do)": polling,
        "a blocking read of each shard": blocking_each,
        "one blocking read of all shards": blocking_all,
    }
    for name, reading in readings.items():
        yield f"| {name} | {asyncio.run(_measured(url, seconds, reading))} |"


async def _measured(url: str, seconds: float, reading: Reading) -> str:
    """Measure the time from a fact's publication on a worker to when a lookup here would find it."""
    redis: Any = Redis.from_url(url)
    await redis.flushall()
    seen: list[list[float]] = [[] for _ in range(NUM_LOOKED_AT)]
    publishers = IndexPublishers(url, seconds)
    async with reading(url) as table:
        while table.num_blocks == 0 and not publishers.has_ended():  # noqa: ASYNC110 - nobody says so
            await asyncio.sleep(LOOK_S)
        before, redis_s, used, began = await _num_reads(redis), await processor(redis), *_clocks()
        while not publishers.has_ended():
            await asyncio.sleep(LOOK_S)
            _look(table, seen)
        used, took = (now - then for now, then in zip(_clocks(), (used, began), strict=True))
        num_reads, redis_s = await _num_reads(redis) - before, await processor(redis) - redis_s
    await redis.aclose()
    late = [
        s - t
        for saw, published_s in zip(seen, publishers.published_at(), strict=False)
        for s, t in zip(saw, published_s, strict=False)
    ]
    return (
        f"{percentile(late, 0.5) * 1e3:.0f} | {percentile(late, 0.99) * 1e3:.0f} | {len(late):,} | "
        f"{num_reads / took:,.0f} | {used / took:.1%} | {redis_s / took:.1%}"
    )


def _clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def _look(table: PrefixTable, seen: list[list[float]]) -> None:
    """Record when the first block of each step becomes visible."""
    for number, saw in enumerate(seen):
        held = table.held(worker(number))
        while held is not None and held.tier(first_name(number, len(saw))):
            saw.append(time.perf_counter())


async def processor(redis: Any) -> float:
    """Return the seconds of processor time that the Redis server has used."""
    info = await redis.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def _num_reads(redis: Any) -> int:
    info: Mapping[str, Mapping[str, int]] = await redis.info("commandstats")
    return int(info.get("cmdstat_xread", {}).get("calls", 0))


@asynccontextmanager
async def polling(url: str) -> AsyncGenerator[PrefixTable, None]:
    index = PrefixIndexClient(IndexReader(url, NAMESPACE), IndexedWorkers(), 1, SystemClock())
    await index.start()
    yield index.table
    await index.stop()


@asynccontextmanager
async def blocking_each(url: str) -> AsyncGenerator[PrefixTable, None]:
    """Keep a table up to date with one connection for each shard, each of which wakes the gateway.

    A Redis Cluster would need this.
    """
    mirror = _mirror()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_block(url, mirror, [shard])) for shard in range(NUM_SHARDS)]
        yield mirror.table
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def blocking_all(url: str) -> AsyncGenerator[PrefixTable, None]:
    """Keep a table up to date with one connection and one command over all keys, which a Redis Cluster rejects."""
    mirror = _mirror()
    task = asyncio.create_task(_block(url, mirror, list(range(NUM_SHARDS))))
    yield mirror.table
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _mirror() -> KVIndexer:
    mirror = KVIndexer(PrefixTable())
    mirror.set_workers(IndexedWorkers().workers())
    return mirror


async def _block(url: str, mirror: KVIndexer, shards: list[int]) -> None:
    after = {f"{{{NAMESPACE}:index:{shard}}}".encode(): b"0-0" for shard in shards}
    redis: Any = Redis.from_url(url)
    async with redis:
        while True:
            for stream, found in await redis.xread(after, count=READ_ENTRIES, block=BLOCK_MS) or ():
                after[stream] = found[-1][0]
                for _, fields in found:
                    mirror.take(unpack_entry(fields[b"f"]))
