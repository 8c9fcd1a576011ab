"""Measure what the worker registry costs Redis as a cluster grows: a worker's command and a gateway's.

    python -m loadtest.cluster.registry [--workers 10 100 1000 10000]

Each worker publishes its record every few seconds, each gateway lists all records every second. Redis runs its commands
one after another, so the time of all commands of one second bounds the size of the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

from redis.asyncio import Redis

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.orchestration.known_workers import DISCOVERY_PERIOD_S
from tandem.stores.embedded_redis import EmbeddedServer
from tandem.stores.worker_registry import BEATS_PER_TTL, DEFAULT_TTL_S, WorkerRecord, WorkerRegistry

REPEATS = 15


class Cost(NamedTuple):
    """Redis processor seconds of one call, as medians.

    `list_s` is a list where nothing has changed, `full_s` a list that sends all `list_bytes` again.
    """

    num_workers: int
    publish_s: float
    list_s: float
    full_s: float
    list_bytes: int

    def busy(self, num_gateways: int) -> float:
        """Return the share of Redis's one thread that is used by `num_gateways` gateways while no worker joins or
        leaves."""
        beats = self.num_workers * BEATS_PER_TTL / DEFAULT_TTL_S
        return beats * self.publish_s + num_gateways / DISCOVERY_PERIOD_S * self.list_s


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="loadtest.cluster.registry", description="What the registry costs Redis.")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--gateways", type=int, nargs="+", default=[2, 20, 100])
    args = parser.parse_args(argv)
    costs = asyncio.run(_measure(args.workers))
    heads = "".join(f" busy with {number} gateways |" for number in args.gateways)
    sys.stdout.write(
        f"| workers | publish us | list us | list after a change ms | KB |{heads}\n|---:|---:|---:|---:|---:|"
    )
    sys.stdout.write("---:|" * len(args.gateways) + "\n")
    for cost in costs:
        row = [f"{cost.num_workers:,}", f"{cost.publish_s * 1e6:.0f}", f"{cost.list_s * 1e6:.0f}"]
        row += [f"{cost.full_s * 1e3:.2f}", f"{cost.list_bytes / 1e3:,.0f}"]
        row += [f"{cost.busy(number):.1%}" for number in args.gateways]
        sys.stdout.write("| " + " | ".join(row) + " |\n")
    return 0


async def _measure(sizes: Sequence[int]) -> list[Cost]:
    server = await asyncio.to_thread(EmbeddedServer.start)
    try:
        return [await _cost(server.url, size) for size in sizes]
    finally:
        await asyncio.to_thread(server.stop)


async def _cost(url: str, num_workers: int) -> Cost:
    """Measure a registry in its own namespace, whose entries outlive the measurement."""
    registry = WorkerRegistry(url, f"size-{num_workers}", ttl_s=600.0)
    redis = Redis.from_url(url)
    records = [_record(number) for number in range(num_workers)]
    try:
        for record in records:
            await registry.publish(record)
        publish_s = await _processor(redis, REPEATS * 20, lambda: registry.publish(records[0]))
        list_s = await _processor(redis, REPEATS * 20, registry.list)
        full_s = await _processor(redis, REPEATS, _list_after_change(registry, records[0])) - publish_s
    finally:
        await registry.close()
        await redis.aclose()
    return Cost(num_workers, publish_s, list_s, full_s, sum(len(record.to_json()) for record in records))


def _list_after_change(registry: WorkerRegistry, record: WorkerRecord) -> Callable[[], Awaitable[object]]:
    pools = cycle(("mixed", "decode"))

    async def call() -> None:
        await registry.publish(replace(record, pool=next(pools)))
        await registry.list()

    return call


async def _processor(redis: Redis, repeats: int, call: Callable[[], Awaitable[object]]) -> float:
    """Return Redis's own processor seconds for one call, the median of `REPEATS` groups.

    Redis counts the time itself, so the network and this client are excluded.
    """
    found = []
    for _ in range(REPEATS):
        before = await _used(redis)
        for _ in range(max(1, repeats // REPEATS)):
            await call()
        found.append((await _used(redis) - before) / max(1, repeats // REPEATS))
    return statistics.median(found)


async def _used(redis: Redis) -> float:
    info = await redis.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def _record(number: int) -> WorkerRecord:
    worker = WorkerRef(WorkerId(f"tandem-decode-{number:05d}"), Incarnation(1_795 * 10**15), "10.0.0.1:50051")
    return WorkerRecord(
        worker=worker,
        pool="decode",
        model="llama-3.1-8b",
        fingerprint="0" * 64,
        layout="32 layers, 8 heads of 128, bfloat16, blocks of 16",
        max_model_len=131_072,
        bundle_digest="0" * 64,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
