"""Test roles in the registry on a real server: bound to an incarnation, restored after the server lost its data."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from tandem.stores.redis_client import RedisClient
from tandem.stores.worker_registry import WorkerRecord, WorkerRegistry, keep_registered
from tests.effort import effort
from tests.unit.stores.records import BORN, record

pytestmark = pytest.mark.redis

DEADLINE_S = 30.0
_namespaces = itertools.count()


@pytest.fixture
async def registry(redis_url: str, namespace: str) -> AsyncIterator[WorkerRegistry]:
    made = WorkerRegistry(redis_url, namespace, ttl_s=60.0)
    yield made
    await made.close()


async def forget_all(redis: Redis, namespace: str) -> None:
    """Delete one namespace's keys, as a restart of a server without persistence does."""
    await redis.delete(*await redis.keys(f"*{namespace}:*"))


async def test_a_role_is_listed_and_returned_to_its_worker(registry: WorkerRegistry) -> None:
    await registry.publish(record())
    await registry.publish(record("w1"))
    assert await registry.list() == (record(), record("w1"))
    assert await registry.set_role(record().worker, "prefill")
    assert await registry.list() == (record(role="prefill"), record("w1"))
    assert [entry.effective_role for entry in await registry.list()] == ["prefill", "decode"]
    assert await registry.publish(record()) == "prefill"
    assert await registry.publish(record("w1")) == ""
    assert await registry.set_role(record().worker, "mixed")
    assert await registry.publish(record(role="prefill")) == "mixed", "what is set counts, not what was roles_seen"
    assert await registry.list() == (record(role="mixed"), record("w1"))


async def test_only_a_registered_incarnation_can_get_a_role(
    registry: WorkerRegistry, redis: Redis, namespace: str
) -> None:
    assert not await registry.set_role(record().worker, "prefill")
    await registry.publish(record())
    assert not await registry.set_role(record(incarnation=BORN + 1).worker, "prefill")
    assert not await registry.set_role(record("w1").worker, "prefill")
    await redis.zadd(f"{{{namespace}:workers}}:lapse", {"w0": 1})
    assert not await registry.set_role(record().worker, "prefill"), "it has lapsed"
    assert not await redis.exists(f"{{{namespace}:workers}}:roles")


async def test_a_role_ends_with_its_incarnation(registry: WorkerRegistry, redis: Redis, namespace: str) -> None:
    roles = f"{{{namespace}:workers}}:roles"
    later = record(incarnation=BORN + 1)
    await registry.publish(record())
    await registry.set_role(record().worker, "prefill")
    assert await registry.publish(later) == ""
    assert await registry.list() == (later,) and not await redis.exists(roles)
    await registry.set_role(later.worker, "mixed")
    assert not await registry.withdraw(record().worker)
    assert await redis.exists(roles), "a late goodbye of an earlier life"
    assert await registry.withdraw(later.worker)
    assert not await redis.exists(roles)
    await registry.publish(later)
    await registry.set_role(later.worker, "mixed")
    await redis.zadd(f"{{{namespace}:workers}}:lapse", {"w0": 1})
    assert await registry.list() == () and not await redis.exists(roles)


async def test_a_role_survives_a_server_that_lost_everything(
    registry: WorkerRegistry, redis: Redis, redis_url: str, namespace: str
) -> None:
    """The worker learns its role from its heartbeats and sends it when it registers again, also after a lapse."""
    roles_seen: list[str] = []
    brief = WorkerRegistry(redis_url, namespace, ttl_s=0.3)
    beating = asyncio.create_task(keep_registered(brief, record(), roles_seen.append))
    async with asyncio.timeout(DEADLINE_S):
        while not roles_seen:
            await asyncio.sleep(0.01)
        while not await registry.set_role(record().worker, "prefill"):
            await asyncio.sleep(0.01)
        for _ in range(2):
            while roles_seen[-1] != "prefill":
                await asyncio.sleep(0.01)
            await forget_all(redis, namespace)
            while await registry.list() != (record(role="prefill"),):
                await asyncio.sleep(0.01)
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    await brief.close()
    assert set(roles_seen) == {"decode", "prefill"}
    assert await registry.list() == ()


async def test_a_role_lives_as_long_as_the_records(registry: WorkerRegistry, redis: Redis, namespace: str) -> None:
    await registry.publish(record())
    await registry.set_role(record().worker, "prefill")
    for _ in range(2):
        for key in await redis.keys(f"*{namespace}:*"):
            assert 50_000 < await redis.pttl(key) <= 60_000
        await registry.publish(record())
    assert len(await redis.keys(f"*{namespace}:*")) == 4


async def test_setting_the_same_role_again_is_no_change(registry: WorkerRegistry, redis: Redis, namespace: str) -> None:
    await registry.publish(record())
    await registry.set_role(record().worker, "prefill")
    version = await redis.get(f"{{{namespace}:workers}}:version")
    assert await registry.set_role(record().worker, "prefill")
    assert await redis.get(f"{{{namespace}:workers}}:version") == version
    await registry.set_role(record().worker, "decode")
    assert await redis.get(f"{{{namespace}:workers}}:version") != version


_step = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 2)),
    st.tuples(st.just("role"), st.integers(0, 2), st.sampled_from(["prefill", "mixed"])),
    st.tuples(st.just("withdraw"), st.integers(0, 2)),
    st.tuples(st.just("lapse"), st.just(0)),
    st.tuples(st.just("lose"), st.just(0)),
)


@effort(40)
@given(steps=st.lists(_step, max_size=14))
def test_any_sequence_of_operations_matches_a_dictionary(redis_url: str, steps: list[tuple[object, ...]]) -> None:
    asyncio.run(_run(redis_url, f"any{next(_namespaces)}", steps))


async def _run(url: str, namespace: str, steps: list[tuple[object, ...]]) -> None:
    """Run random operations on three incarnations of one worker. `known`: the last role that each has received."""
    registry, client = WorkerRegistry(url, namespace, ttl_s=60.0), RedisClient(url).redis
    lives = [record(incarnation=BORN + life) for life in range(3)]
    held: WorkerRecord | None = None
    known = ["", "", ""]
    try:
        for verb, life, *rest in steps:
            mine = lives[int(str(life))]
            if verb == "publish":
                is_later = held is None or held.worker.incarnation <= mine.worker.incarnation
                role = await registry.publish(replace(mine, role=known[int(str(life))]))
                assert (role is not None) == is_later
                if role is not None:
                    is_renewal = held is not None and held.worker == mine.worker
                    held = held if is_renewal else replace(mine, role=known[int(str(life))])
                    assert held is not None and role == held.role
                    known[int(str(life))] = role
            elif verb == "role":
                is_held = held is not None and held.worker == mine.worker
                assert await registry.set_role(mine.worker, str(rest[0])) == is_held
                held = replace(mine, role=str(rest[0])) if is_held else held
            elif verb == "withdraw":
                is_held = held is not None and held.worker == mine.worker
                assert await registry.withdraw(mine.worker) == is_held
                held = None if is_held else held
            elif verb == "lapse":
                if held is not None:
                    await client.zadd(f"{{{namespace}:workers}}:lapse", {"w0": 1})
                    held = None
                    assert await registry.list() == ()
            else:
                await forget_all(client, namespace) if held is not None else None
                held = None
            assert await registry.list() == (() if held is None else (held,))
    finally:
        await registry.close()
        await client.aclose()
