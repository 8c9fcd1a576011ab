"""Test demand records of gateways and targets of planners on a real server, and the errors without one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tandem.core.ids import GatewayId, PlannerId, ServeId
from tandem.scaling.demand_totals import DemandTotals, QueueBacklog
from tandem.stores import replica_targets as targets_module
from tandem.stores.demand_store import DemandRecord, DemandStore
from tandem.stores.embedded_redis import EmbeddedServer
from tandem.stores.redis_client import RedisHealth, StoreUnavailable
from tandem.stores.replica_targets import OLDER_SERVE, ReplicaTargets, TargetRecord

pytestmark = pytest.mark.redis
MODEL = "org/a {model}: 7%"


@pytest.fixture
async def demand(redis_url: str, namespace: str) -> AsyncIterator[DemandStore]:
    store = DemandStore(redis_url, namespace)
    yield store
    await store.close()


@pytest.fixture
async def targets(redis_url: str, namespace: str) -> AsyncIterator[ReplicaTargets]:
    store = ReplicaTargets(redis_url, namespace, hold_s=60.0)
    yield store
    await store.close()


def demand_record(gateway: str, num_requests: int) -> DemandRecord:
    return DemandRecord(
        gateway=GatewayId(gateway),
        totals={MODEL: DemandTotals(num_requests=num_requests), "b": DemandTotals(num_gaps=7)},
        backlog={MODEL: QueueBacklog(num_requests=1, num_tokens=9)},
    )


def target(planner: str, decode: int) -> TargetRecord:
    return TargetRecord(
        model=MODEL, planner=PlannerId(planner), replicas={"prefill": 1, "decode": decode}, reasons=("x",)
    )


async def test_published_demand_is_read_with_its_age(demand: DemandStore) -> None:
    assert await demand.read() == ()
    await demand.publish(demand_record("g2", 1))
    await demand.publish(demand_record("g1", 3))
    await demand.publish(demand_record("g1", 5))
    one, other = await demand.read()
    assert (one.gateway, other.gateway) == ("g1", "g2")
    assert one.totals[MODEL].num_requests == 5 and one.totals["b"].num_gaps == 7
    assert one.backlog[MODEL] == QueueBacklog(num_requests=1, num_tokens=9) and one.backlog["b"] == QueueBacklog()
    assert 0 <= one.age_s < 60
    await demand.withdraw(GatewayId("g1"))
    assert [record.gateway for record in await demand.read()] == ["g2"]


async def test_demand_lapses_after_its_ttl(redis_url: str, namespace: str) -> None:
    brief, patient = DemandStore(redis_url, namespace, ttl_s=0.05), DemandStore(redis_url, namespace, ttl_s=60.0)
    await patient.publish(demand_record("g1", 1))
    while await brief.read():
        pass  # until it lapses
    assert [record.gateway for record in await patient.read()] == ["g1"], "a reader with a longer ttl still sees it"
    await brief.publish(demand_record("g2", 1))
    assert [record.gateway for record in await patient.read()] == ["g2"], "the next publish with a short ttl deletes it"
    await brief.close()
    await patient.close()


async def test_what_another_version_wrote_is_left_out(
    demand: DemandStore, namespace: str, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await demand.publish(demand_record("g1", 1))
    key = f"{{{namespace}:demand}}:words"
    for text in (
        "no json",
        '{"schema": 9}',
        '{"schema": 1}',
        '{"schema": 1, "models": {"m": {"totals": {"num_gaps": -1}}}}',
    ):
        await redis.hset(key, "g1", text)
        assert await demand.read() == ()
        assert await demand.read() == ()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    newer = '{"schema": 1, "models": {"m": {"totals": {"num_gaps": 2, "num_new": 1}, "backlog": {}}}}'
    await redis.hset(key, "g1", newer)
    (read,) = await demand.read()
    assert read.totals == {"m": DemandTotals(num_gaps=2)}


async def test_only_the_leading_planner_publishes(targets: ReplicaTargets) -> None:
    assert await targets.read(MODEL) is None
    assert await targets.publish(target("p1", 2)) == "p1"
    assert await targets.publish(target("p2", 9)) == "p1"
    assert await targets.publish(target("p1", 3)) == "p1"
    assert await targets.read(MODEL) == target("p1", 3)
    assert await targets.read("b") is None
    await targets.resign(MODEL, PlannerId("p2"))
    assert await targets.publish(target("p2", 9)) == "p1", "only the leader can resign"
    await targets.resign(MODEL, PlannerId("p1"))
    assert await targets.read(MODEL) == target("p1", 3), "the target outlives the resignation"
    assert await targets.publish(target("p2", 4)) == "p2"


async def test_leadership_lapses_after_the_hold_time(redis_url: str, namespace: str) -> None:
    brief = ReplicaTargets(redis_url, namespace, hold_s=0.05)
    await brief.publish(target("p1", 2))
    while await brief.publish(target("p2", 4)) != "p2":
        pass  # until p1's leadership lapses
    assert await brief.read(MODEL) == target("p2", 4)
    await brief.close()


async def test_deployed_numbers_are_kept_by_role_and_serve(targets: ReplicaTargets) -> None:
    assert await targets.deployed(MODEL) == {}
    one, other = ServeId("head-1"), ServeId("head-2")
    await targets.publish_deployed(MODEL, "decode", one, 3)
    await targets.publish_deployed(MODEL, "decode", other, 7)
    await targets.publish_deployed(MODEL, "prefill", other, 1)
    await targets.publish_deployed(MODEL, "decode", one, 4)
    assert await targets.deployed(MODEL) == {"decode": {one: 4, other: 7}, "prefill": {other: 1}}
    assert await targets.deployed("b") == {}


async def test_a_deployed_number_lapses_after_its_ttl(targets: ReplicaTargets, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, there = ServeId("head-1"), ServeId("head-2")
    await targets.publish_deployed(MODEL, "decode", there, 2)
    monkeypatch.setattr(targets_module, "DEPLOYED_TTL_S", 0.05)
    await targets.publish_deployed(MODEL, "decode", gone, 3)
    monkeypatch.undo()
    await targets.publish_deployed(MODEL, "decode", there, 2)
    while await targets.deployed(MODEL) != {"decode": {there: 2}}:
        pass  # until it lapses


async def test_deployed_numbers_of_an_older_version_are_read(targets: ReplicaTargets, redis: Redis) -> None:
    """An older version writes one key for each role, which holds only a number."""
    await redis.set(f"{targets._prefix(MODEL)}:deployed:decode", 5, px=60_000)
    assert await targets.deployed(MODEL) == {"decode": {OLDER_SERVE: 5}}
    await targets.publish_deployed(MODEL, "decode", ServeId("head-2"), 2)
    assert await targets.deployed(MODEL) == {"decode": {OLDER_SERVE: 5, "head-2": 2}}


NO_REASONS = '{"schema": 1, "replicas": {"decode": 1}, "reasons": null}'


async def test_targets_of_another_version_are_none(targets: ReplicaTargets, redis: Redis) -> None:
    for text in (
        "no json",
        "[]",
        '{"schema": 2}',
        '{"schema": 1, "replicas": {"decode": -1}}',
        '{"schema": 1}',
        NO_REASONS,
    ):
        await redis.set(targets._keys(MODEL)[0], text)
        assert await targets.read(MODEL) is None


async def test_without_a_server(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nothing.sock"
    demand, targets = DemandStore(url, "n"), ReplicaTargets(url, "n")
    for call in (demand.read, lambda: demand.publish(demand_record("g", 1)), lambda: demand.withdraw(GatewayId("g"))):
        with pytest.raises(StoreUnavailable):
            await call()
    for call in (lambda: targets.read("m"), lambda: targets.publish(target("p", 1)), lambda: targets.deployed("m")):
        with pytest.raises(StoreUnavailable):
            await call()
    await demand.close()
    await targets.close()


async def test_redis_stays_down_while_a_planner_can_read_and_not_write(namespace: str) -> None:
    """As on a full server. Both are scripts: one that succeeds says nothing about another one."""
    health = RedisHealth()
    with EmbeddedServer.start() as server:
        store = ReplicaTargets(server.url, namespace, health=health)
        await store._redis.execute("CONFIG", "SET", "min-replicas-to-write", 1)
        with pytest.raises(StoreUnavailable, match="replicas"):
            await store.publish(target("p", 1))
        assert await store.deployed(MODEL) == {}
        assert not health.is_up
        await store._redis.execute("CONFIG", "SET", "min-replicas-to-write", 0)
        await store.publish(target("p", 1))
        assert health.is_up
        await store.close()
