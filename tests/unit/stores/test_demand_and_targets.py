"""Demand that gateways tell and targets that planners say, on a real server, and without one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tandem.core.ids import GatewayId, PlannerId, ServeId
from tandem.stores import replica_targets as targets_module
from tandem.stores.demand_store import DemandRecord, DemandStore, DemandTotals, DemandUnavailable, QueueBacklog
from tandem.stores.redis_client import connect
from tandem.stores.replica_targets import OLDER_SERVE, ReplicaTargets, TargetRecord, TargetsUnavailable

pytestmark = pytest.mark.redis
_numbers = itertools.count()
MODEL = "org/a {model}: 7%"


@pytest.fixture
def namespace() -> str:
    return f"planned{next(_numbers)}"


def word(gateway: str, num_requests: int) -> DemandRecord:
    return DemandRecord(
        gateway=GatewayId(gateway),
        totals={MODEL: DemandTotals(num_requests=num_requests), "b": DemandTotals(num_gaps=7)},
        backlog={MODEL: QueueBacklog(num_requests=1, num_tokens=9)},
    )


def target(planner: str, decode: int) -> TargetRecord:
    return TargetRecord(
        model=MODEL, planner=PlannerId(planner), replicas={"prefill": 1, "decode": decode}, reasons=("x",)
    )


async def test_what_gateways_tell_is_read_with_its_age(redis_url: str, namespace: str) -> None:
    board = DemandStore(redis_url, namespace)
    assert await board.read() == ()
    await board.tell(word("g2", 1))
    await board.tell(word("g1", 3))
    await board.tell(word("g1", 5))
    one, other = await board.read()
    assert (one.gateway, other.gateway) == ("g1", "g2")
    assert one.totals[MODEL].num_requests == 5 and one.totals["b"].num_gaps == 7
    assert one.backlog[MODEL] == QueueBacklog(num_requests=1, num_tokens=9) and one.backlog["b"] == QueueBacklog()
    assert 0 <= one.age_s < 60
    await board.withdraw(GatewayId("g1"))
    assert [record.gateway for record in await board.read()] == ["g2"]
    await board.close()


async def test_who_is_silent_for_too_long_is_forgotten(redis_url: str, namespace: str) -> None:
    board, patient = DemandStore(redis_url, namespace, ttl_s=0.05), DemandStore(redis_url, namespace, ttl_s=60.0)
    await patient.tell(word("g1", 1))
    while await board.read():
        pass  # until its time is over
    assert [record.gateway for record in await patient.read()] == ["g1"], "to whom waits longer it is there"
    await board.tell(word("g2", 1))
    assert [record.gateway for record in await patient.read()] == ["g2"], "and gone once somebody else spoke"
    await board.close()
    await patient.close()


async def test_what_another_version_wrote_is_left_out(
    redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    board = DemandStore(redis_url, namespace)
    await board.tell(word("g1", 1))
    redis = connect(redis_url)
    key = f"{{{namespace}:demand}}:words"
    for text in (
        "no json",
        '{"schema": 9}',
        '{"schema": 1}',
        '{"schema": 1, "models": {"m": {"totals": {"num_gaps": -1}}}}',
    ):
        await redis.hset(key, "g1", text)  # type: ignore[misc]
        assert await board.read() == ()
        assert await board.read() == ()
    assert len([record for record in caplog.records if "is left out" in record.message]) == 1
    newer = '{"schema": 1, "models": {"m": {"totals": {"num_gaps": 2, "num_new": 1}, "backlog": {}}}}'
    await redis.hset(key, "g1", newer)  # type: ignore[misc]
    (read,) = await board.read()
    assert read.totals == {"m": DemandTotals(num_gaps=2)}
    await redis.aclose()
    await board.close()


async def test_one_planner_is_heard_at_a_time(redis_url: str, namespace: str) -> None:
    targets = ReplicaTargets(redis_url, namespace, hold_s=60.0)
    assert await targets.read(MODEL) is None
    assert await targets.publish(target("p1", 2)) == "p1"
    assert await targets.publish(target("p2", 9)) == "p1"
    assert await targets.publish(target("p1", 3)) == "p1"
    assert await targets.read(MODEL) == target("p1", 3)
    assert await targets.read("b") is None
    await targets.resign(MODEL, PlannerId("p2"))
    assert await targets.publish(target("p2", 9)) == "p1", "nobody resigns for another one"
    await targets.resign(MODEL, PlannerId("p1"))
    assert await targets.read(MODEL) == target("p1", 3), "what was said holds on"
    assert await targets.publish(target("p2", 4)) == "p2"
    await targets.close()


async def test_a_planner_that_is_silent_is_not_waited_for(redis_url: str, namespace: str) -> None:
    hasty = ReplicaTargets(redis_url, namespace, hold_s=0.05)
    await hasty.publish(target("p1", 2))
    while await hasty.publish(target("p2", 4)) != "p2":
        pass  # until p1's right to speak is over
    assert await hasty.read(MODEL) == target("p2", 4)
    await hasty.close()


async def test_what_serve_means_to_have_is_told(redis_url: str, namespace: str) -> None:
    targets = ReplicaTargets(redis_url, namespace)
    assert await targets.deployed(MODEL) == {}
    one, other = ServeId("head-1"), ServeId("head-2")
    await targets.tell_deployed(MODEL, "decode", one, 3)
    await targets.tell_deployed(MODEL, "decode", other, 7)
    await targets.tell_deployed(MODEL, "prefill", other, 1)
    await targets.tell_deployed(MODEL, "decode", one, 4)
    assert await targets.deployed(MODEL) == {"decode": {one: 4, other: 7}, "prefill": {other: 1}}
    assert await targets.deployed("b") == {}
    await targets.close()


async def test_a_serve_that_is_silent_has_no_workers(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = ReplicaTargets(redis_url, namespace)
    gone, there = ServeId("head-1"), ServeId("head-2")
    await targets.tell_deployed(MODEL, "decode", there, 2)
    monkeypatch.setattr(targets_module, "DEPLOYED_TTL_S", 0.05)
    await targets.tell_deployed(MODEL, "decode", gone, 3)
    monkeypatch.undo()
    await targets.tell_deployed(MODEL, "decode", there, 2)
    while await targets.deployed(MODEL) != {"decode": {there: 2}}:
        pass  # until its time is over
    await targets.close()


async def test_a_serve_of_an_older_version_is_heard(redis_url: str, namespace: str) -> None:
    """It has a key for each role, with a number alone."""
    targets, redis = ReplicaTargets(redis_url, namespace), connect(redis_url)
    await redis.set(f"{targets._prefix(MODEL)}:deployed:decode", 5, px=60_000)
    assert await targets.deployed(MODEL) == {"decode": {OLDER_SERVE: 5}}
    await targets.tell_deployed(MODEL, "decode", ServeId("head-2"), 2)
    assert await targets.deployed(MODEL) == {"decode": {OLDER_SERVE: 5, "head-2": 2}}
    await redis.aclose()
    await targets.close()


NO_REASONS = '{"schema": 1, "replicas": {"decode": 1}, "reasons": null}'


async def test_targets_of_another_version_are_none(redis_url: str, namespace: str) -> None:
    targets, redis = ReplicaTargets(redis_url, namespace), connect(redis_url)
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
    await redis.aclose()
    await targets.close()


async def test_without_a_server(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nothing.sock"
    board, targets = DemandStore(url, "n"), ReplicaTargets(url, "n")
    for call in (board.read, lambda: board.tell(word("g", 1)), lambda: board.withdraw(GatewayId("g"))):
        with pytest.raises(DemandUnavailable):
            await call()
    for ask in (lambda: targets.read("m"), lambda: targets.publish(target("p", 1)), lambda: targets.deployed("m")):
        with pytest.raises(TargetsUnavailable):
            await ask()
    await board.close()
    await targets.close()
