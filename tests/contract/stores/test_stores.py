"""What every store does on an embedded server, on one that listens on TCP, and on a Redis Cluster of three."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.admission.quota import QuotaLimits, Reservation
from tandem.admission.request_queue import ModelFlow
from tandem.admission.tenant_queue import FlowKey
from tandem.core.ids import GatewayId, Incarnation, PlannerId, ServeId, TenantId, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.kv.kv_event_log import KVEventBatch
from tandem.routing.kv_indexer import WorkerKVEvents
from tandem.scaling.demand_totals import DemandTotals
from tandem.stores.demand_store import DemandRecord, DemandStore
from tandem.stores.prefix_index import IndexReader, IndexSnapshot, IndexWriter
from tandem.stores.quota_store import GatewayRegistry, RedisQuotas
from tandem.stores.redis_client import RedisClient, RedisHealth
from tandem.stores.replica_targets import ReplicaTargets, TargetRecord
from tandem.stores.service_counters import ServiceCounters
from tandem.stores.worker_registry import WorkerRecord, WorkerRegistry

pytestmark = pytest.mark.redis

LIMITS = QuotaLimits(requests_per_minute=10, tokens_per_minute=1000, max_concurrency=3)
TENANTS = [TenantId(f"t{number} {{☃}}") for number in range(12)]
"""Slots on every node of a cluster."""


@pytest.fixture
def health() -> RedisHealth:
    return RedisHealth()


@pytest.fixture
async def client(url: str) -> AsyncIterator[Any]:
    client = RedisClient(url).redis
    yield client
    await client.aclose()


def ref(name: str, incarnation: int = 7) -> WorkerRef:
    return WorkerRef(WorkerId(name), Incarnation(incarnation), "127.0.0.1:1")


def record(name: str, incarnation: int = 7) -> WorkerRecord:
    return WorkerRecord(
        worker=ref(name, incarnation), pool="decode", model="m", fingerprint="ab", layout="3h",
        max_model_len=64, bundle_digest="cd",
    )  # fmt: skip


async def forget_scripts(client: Any) -> None:
    """As a restart or a failover does."""
    await client.execute_command("SCRIPT FLUSH")


async def test_the_registry(url: str, namespace: str, client: Any, health: RedisHealth) -> None:
    registry = WorkerRegistry(url, namespace, health=health)
    assert await registry.list() == ()
    assert await registry.publish(record("w1")) is not None
    await forget_scripts(client)
    assert await registry.publish(record("w0", 8)) is not None
    assert await registry.publish(record("w0", 7)) is None, "a later life holds the id"
    assert [one.worker for one in await registry.list()] == [ref("w0", 8), ref("w1")]
    assert await registry.set_role(ref("w1"), "prefill")
    assert [one.role for one in await registry.list()] == ["", "prefill"]
    assert await registry.withdraw(ref("w1")) and not await registry.withdraw(ref("w1"))
    assert [one.worker.id for one in await registry.list()] == ["w0"]
    await registry.close()
    assert health.is_up and not health.num_errors


async def test_quotas_of_many_tenants_in_one_turn(url: str, namespace: str, client: Any, health: RedisHealth) -> None:
    quotas = RedisQuotas(url, namespace, answer_s=30.0, health=health)
    for number in range(3):
        verdicts = await asyncio.gather(
            *(quotas.reserve(t, LIMITS, Reservation(f"r{number}", 1, 100)) for t in TENANTS)
        )
        assert [verdict.refused for verdict in verdicts] == [""] * len(TENANTS)
        await forget_scripts(client)
    verdicts = await asyncio.gather(*(quotas.reserve(t, LIMITS, Reservation("r4", 1, 100)) for t in TENANTS))
    assert {verdict.refused for verdict in verdicts} == {"concurrency"}
    gone = await asyncio.gather(*(quotas.renew(t, LIMITS, {"r0": 50, "unknown": 1}) for t in TENANTS))
    assert gone == [{"unknown"}] * len(TENANTS)
    # A reservation comes after a settlement that was called before it.
    calls = [call for t in TENANTS for call in (quotas.settle(t, LIMITS, "r0", 50), again(quotas, t))]
    assert [answer.refused for answer in (await asyncio.gather(*calls))[1::2]] == [""] * len(TENANTS)
    await quotas.close()
    assert health.is_up and not health.num_errors


def again(quotas: RedisQuotas, tenant: TenantId):  # type: ignore[no-untyped-def]  # a coroutine that was called
    return quotas.reserve(tenant, LIMITS, Reservation("r5", 1, 100))


async def test_counters_and_the_roll(url: str, namespace: str, client: Any, health: RedisHealth) -> None:
    service = ModelFlow("m", FlowKey(Lane.BATCH, TenantId("acme")))
    one, two = (ServiceCounters(url, namespace, GatewayId(name), health=health) for name in ("g1", "g2"))
    assert await one.exchange([]) == [] and await two.exchange([(service, 5)]) == []
    await forget_scripts(client)
    assert await one.exchange([]) == [(service, 5)]
    roll = GatewayRegistry(url, namespace, ttl_s=60.0, health=health)
    assert [await roll.beat(GatewayId(name)) for name in ("g1", "g2", "g1")] == [1, 2, 2]
    assert await roll.withdraw(GatewayId("g1")) == 1
    for store in (one, two, roll):
        await store.close()
    assert health.is_up and not health.num_errors


async def test_the_prefix_index(url: str, namespace: str, health: RedisHealth) -> None:
    workers = [ref(f"w{number}") for number in range(8)]
    writers = [IndexWriter(url, namespace, worker, health=health) for worker in workers]
    reader = IndexReader(url, namespace, health=health)
    words = [array("Q", [number, 2**63 + number]) for number in range(8)]
    written = [
        WorkerKVEvents(worker.id, worker.incarnation, KVEventBatch(3, w))
        for worker, w in zip(workers, words, strict=True)
    ]
    for writer, entry in zip(writers, written, strict=True):
        await writer.append([entry])
    entries, has_more = await reader.read()
    assert sorted(entries, key=lambda entry: entry.worker) == written and not has_more
    assert (await reader.read())[0] == []
    snapshot = IndexSnapshot(workers[0].incarnation, 5, 64, array("Q", range(1, 9)))
    assert await writers[0].renew() is None
    await writers[0].write(snapshot)
    await reader.request_snapshot(workers[0], 9)
    assert await writers[0].renew() == 9
    assert await reader.snapshot(workers[0].id) == snapshot and await reader.snapshot(workers[1].id) is None
    await writers[0].withdraw()
    assert await reader.snapshot(workers[0].id) is None
    for store in (*writers, reader):
        await store.close()
    assert health.is_up and not health.num_errors


@given(st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True))
def test_keys_of_one_script_share_a_slot(name: str) -> None:
    """On a single server nobody would notice."""
    quotas, roll = RedisQuotas("redis://x", "ns"), GatewayRegistry("redis://x", "ns", ttl_s=1.0)
    registry, counters = WorkerRegistry("redis://x", "ns"), ServiceCounters("redis://x", "ns", GatewayId(name))
    for keys in (quotas._keys(TenantId(name)), roll._keys, registry._keys, counters._keys):
        assert len({tag(key) for key in keys}) == 1


def tag(key: str) -> str:
    """What Redis Cluster hashes of a key, by its specification: between the first { and the next }, if anything."""
    start = key.find("{")
    end = key.find("}", start + 1)
    return key[start + 1 : end] if start >= 0 and end > start + 1 else key


async def test_demand_and_targets(url: str, namespace: str, client: Any, health: RedisHealth) -> None:
    """Models whose names have braces, on every node of a cluster."""
    board, targets = DemandStore(url, namespace, health=health), ReplicaTargets(url, namespace, health=health)
    for number in range(3):
        totals = {tenant: DemandTotals(num_requests=number) for tenant in TENANTS}
        await board.publish(DemandRecord(gateway=GatewayId(f"g{number}"), totals=totals))
        await forget_scripts(client)
    assert [record.totals[TENANTS[0]].num_requests for record in await board.read()] == [0, 1, 2]
    await board.withdraw(GatewayId("g1"))
    assert [record.gateway for record in await board.read()] == ["g0", "g2"]
    for model in TENANTS:
        target = TargetRecord(model=model, planner=PlannerId("p1"), replicas={"decode": 2})
        assert await targets.publish(target) == "p1" and await targets.read(model) == target
        assert await targets.publish(replace(target, planner=PlannerId("p2"))) == "p1"
        await targets.publish_deployed(model, "decode", ServeId("head-1"), 3)
        assert await targets.deployed(model) == {"decode": {"head-1": 3}}
        await targets.resign(model, PlannerId("p1"))
        assert await targets.publish(replace(target, planner=PlannerId("p2"))) == "p2"
    await board.close()
    await targets.close()
    assert health.is_up and not health.num_errors
