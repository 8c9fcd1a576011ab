"""Test the registry on a real server: fencing of incarnations, lapsing, records of other versions, and outages."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from tandem.core.errors import TandemError
from tandem.core.topology import Topology
from tandem.stores.embedded_redis import EmbeddedServer
from tandem.stores.redis_client import RedisClient, RedisHealth, StoreUnavailable
from tandem.stores.worker_registry import WorkerRecord, WorkerRegistry, keep_registered
from tests.unit.stores.records import BORN, record

Make = Callable[..., WorkerRegistry]

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """Start a separate server, because these tests flush it."""
    with EmbeddedServer.start() as server:
        yield server.url


@pytest.fixture
async def redis(redis: Redis) -> Redis:
    await redis.flushall()
    return redis


@pytest.fixture
async def make(redis: Redis, redis_url: str) -> AsyncIterator[Make]:
    """Return a function that makes registries of the namespace `test` on an empty server."""
    made: list[WorkerRegistry] = []

    def make_one(
        *, url: str = redis_url, ttl_s: float = 60.0, namespace: str = "test", health: RedisHealth | None = None
    ) -> WorkerRegistry:
        made.append(WorkerRegistry(url, namespace, ttl_s=ttl_s, health=health))
        return made[-1]

    yield make_one
    for registry in made:
        await registry.close()


@pytest.fixture
def registry(make: Make) -> WorkerRegistry:
    return make()


@pytest.mark.redis
class TestRegistry:
    async def test_it_lists_what_was_published(self, registry: WorkerRegistry) -> None:
        assert await registry.list() == ()
        second, first = record("w1", port=2), record("w0")
        assert await registry.publish(second) is not None
        assert await registry.publish(first) is not None
        assert await registry.publish(first) is not None
        assert await registry.list() == (first, second)

    async def test_a_later_incarnation_replaces_an_earlier_but_not_vice_versa(self, registry: WorkerRegistry) -> None:
        old, new = record(), record(incarnation=BORN + 1, port=2)
        assert await registry.publish(old) is not None
        assert await registry.publish(new) is not None
        assert await registry.publish(old) is None
        assert await registry.list() == (new,)

    async def test_incarnations_of_different_length_compare_as_numbers(self, registry: WorkerRegistry) -> None:
        assert await registry.publish(record(incarnation=2**64 - 1)) is not None
        assert await registry.publish(record(incarnation=9)) is None
        assert await registry.publish(record("w1", incarnation=9)) is not None
        assert await registry.publish(record("w1", incarnation=10)) is not None

    async def test_a_late_withdrawal_of_an_earlier_incarnation_does_nothing(self, registry: WorkerRegistry) -> None:
        old, new = record(), record(incarnation=BORN + 1)
        await registry.publish(old)
        await registry.publish(new)
        assert not await registry.withdraw(old.worker)
        assert await registry.list() == (new,)
        assert await registry.withdraw(new.worker)
        assert not await registry.withdraw(new.worker)
        assert await registry.list() == ()

    async def test_the_same_incarnation_may_change_its_record(self, registry: WorkerRegistry) -> None:
        await registry.publish(record())
        changed = replace(record(), pool="mixed")
        assert await registry.publish(changed) is not None
        assert await registry.list() == (changed,)

    async def test_a_lapsed_entry_can_be_replaced_by_an_earlier_incarnation(
        self, registry: WorkerRegistry, make: Make
    ) -> None:
        brief = make(ttl_s=0.05)
        late, early = record(incarnation=BORN + 1), record()
        await registry.publish(record("w1"))
        await brief.publish(late)
        async with asyncio.timeout(DEADLINE_S):
            while await registry.publish(early) is None:
                await asyncio.sleep(0.01)
        assert await registry.list() == (early, record("w1"))

    async def test_lapsed_entries_are_not_listed_and_all_keys_expire(self, redis: Redis, make: Make) -> None:
        brief = make(ttl_s=0.05)
        await brief.publish(record())
        async with asyncio.timeout(DEADLINE_S):
            while await brief.list():
                await asyncio.sleep(0.01)
            while await redis.dbsize():
                await asyncio.sleep(0.01)

    async def test_a_short_ttl_does_not_shorten_that_of_other_entries(self, redis: Redis, make: Make) -> None:
        await make(ttl_s=60.0).publish(record("w1"))
        await make(ttl_s=0.5).publish(record("w0"))
        for key in await redis.keys("*"):
            assert await redis.pttl(key) > 1000

    async def test_namespaces_do_not_see_each_other(self, make: Make, registry: WorkerRegistry) -> None:
        await registry.publish(record())
        assert await make(namespace="other").list() == ()

    async def test_all_keys_share_a_slot(self, redis: Redis, registry: WorkerRegistry) -> None:
        await registry.publish(record())
        keys = await redis.keys("*")
        assert len(keys) == 3
        assert {str(key).count("{test:workers}") for key in keys} == {1}

    async def test_scripts_that_the_server_forgot_are_sent_again(self, redis: Redis, registry: WorkerRegistry) -> None:
        await registry.publish(record())
        await redis.script_flush()
        assert await registry.list() == (record(),)

    async def test_a_record_of_another_version_is_left_out_and_logged_once(
        self, redis: Redis, registry: WorkerRegistry, caplog: pytest.LogCaptureFixture
    ) -> None:
        await registry.publish(record("w1"))
        await redis.hset("{test:workers}:records", "w0", f"{1:020d}" + json.dumps({"schema": 99}))
        for _ in range(3):
            assert await registry.list() == (record("w1"),)
        assert [r.getMessage() for r in caplog.records] == [
            "a worker in the registry is ignored, because its record is unreadable: not a record of schema 1"
        ]

    async def test_records_are_sent_again_only_when_they_changed(
        self, redis: Redis, make: Make, registry: WorkerRegistry
    ) -> None:
        """A record that is written without the scripts is not seen until the version changes."""
        reader = make()
        await registry.publish(record("w1"))
        assert await reader.list() == (record("w1"),)
        hidden = f"{BORN:020d}" + record("w0").to_json()
        await redis.hset("{test:workers}:records", "w0", hidden)
        await registry.publish(record("w1"))
        assert await reader.list() == (record("w1"),), "a heartbeat is no change"
        await registry.publish(record("w2"))
        assert await reader.list() == (record("w0"), record("w1"), record("w2"))

    @pytest.mark.parametrize("what", ["publish", "life", "record", "withdraw", "lapse", "flush"])
    async def test_every_change_is_seen_by_a_reader_of_the_state_before(
        self, redis: Redis, make: Make, registry: WorkerRegistry, what: str
    ) -> None:
        reader, other = make(), record("w1")
        await registry.publish(record())
        await registry.publish(other)
        assert await reader.list() == (record(), other)
        match what:
            case "publish":
                await registry.publish(record("w2"))
                expected: tuple[WorkerRecord, ...] = (record(), other, record("w2"))
            case "life":
                await registry.publish(record(incarnation=BORN + 1))
                expected = (record(incarnation=BORN + 1), other)
            case "record":
                await registry.publish(replace(record(), pool="mixed"))
                expected = (replace(record(), pool="mixed"), other)
            case "withdraw":
                await registry.withdraw(record().worker)
                expected = (other,)
            case "lapse":
                await redis.zadd("{test:workers}:lapse", {"w0": 1})
                expected = (other,)
            case _:
                await redis.flushall()
                await registry.publish(other)
                expected = (other,)
        assert await reader.list() == expected
        assert await reader.list() == expected

    async def test_a_replica_that_missed_a_change_does_not_repeat_its_version(
        self, redis: Redis, make: Make, registry: WorkerRegistry
    ) -> None:
        """Restore the state before a change, as a failover does, and then make another change."""
        reader = make()
        for name in ("w0", "w1", "w2"):
            await registry.publish(record(name))
        before = [await redis.dump(f"{{test:workers}}:{key}") for key in ("records", "lapse", "version")]
        await redis.zadd("{test:workers}:lapse", {"w0": 1})
        assert await reader.list() == (record("w1"), record("w2"))
        for key, value in zip(("records", "lapse", "version"), before, strict=True):
            await redis.restore(f"{{test:workers}}:{key}", 10_000, value, replace=True)
        await redis.zadd("{test:workers}:lapse", {"w0": 1, "w1": 1})
        assert await reader.list() == (record("w2"),)
        for key, value in zip(("records", "lapse", "version"), before, strict=True):
            await redis.restore(f"{{test:workers}}:{key}", 10_000, value, replace=True)
        await registry.withdraw(record("w2").worker)
        assert await reader.list() == (record("w0"), record("w1"))


class Outage:
    """Embedded server that can stop, lose its data and start again under the same address."""

    def __init__(self, directory: Path) -> None:
        self._link = directory / "redis.sock"
        self.url = f"unix://{self._link}"
        self._server: EmbeddedServer | None = None

    def begin(self) -> None:
        assert self._server is not None
        self._server.stop()
        self._link.unlink()

    def end(self) -> None:
        self._server = EmbeddedServer.start()
        self._link.symlink_to(self._server.url.removeprefix("unix://"))

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()


@pytest.fixture
def outage(tmp_path: Path) -> Iterator[Outage]:
    server = Outage(tmp_path)
    server.end()
    yield server
    server.close()


@pytest.mark.redis
class TestOutage:
    async def test_methods_raise_one_typed_error_and_heal(self, outage: Outage, make: Make) -> None:
        registry = make(url=outage.url)
        assert await registry.publish(record()) is not None
        outage.begin()
        for call in (registry.list, lambda: registry.publish(record()), lambda: registry.withdraw(record().worker)):
            with pytest.raises(StoreUnavailable):
                await call()
        outage.end()
        assert await registry.list() == ()
        assert await registry.publish(record()) is not None
        assert await registry.list() == (record(),)

    @pytest.mark.slow
    async def test_a_worker_registers_again_with_a_server_that_lost_it(
        self, outage: Outage, make: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "tandem")
        health = RedisHealth()
        registry = make(url=outage.url, ttl_s=0.3, health=health)
        async with asyncio.timeout(DEADLINE_S), registered(registry):
            await until(lambda: num_registered(caplog) == 1)
            outage.begin()
            await until(lambda: not health.is_up)
            outage.end()
            await until(lambda: num_registered(caplog) == 2)
            assert await registry.list() == (record(),)
        assert await registry.list() == ()


@pytest.mark.redis
class TestHeartbeat:
    async def test_heartbeats_keep_an_entry_alive_beyond_its_ttl(self, redis: Redis, make: Make) -> None:
        registry = make(ttl_s=0.4)
        async with asyncio.timeout(DEADLINE_S), registered(registry):
            lapses = await lapse(redis)
            while await lapse(redis) < lapses + 400:
                await asyncio.sleep(0.02)
            assert await registry.list() == (record(),)

    async def test_an_earlier_incarnation_is_superseded_and_leaves_the_later_alone(
        self, registry: WorkerRegistry, caplog: pytest.LogCaptureFixture
    ) -> None:
        later = record(incarnation=BORN + 1)
        await registry.publish(later)
        async with asyncio.timeout(DEADLINE_S), registered(registry):
            await until(lambda: "a later worker with its id is registered" in caplog.text)
        assert await registry.list() == (later,)

    async def test_it_can_be_stopped_in_an_outage(self, tmp_path: Path, make: Make) -> None:
        health = RedisHealth()
        registry = make(url=f"unix://{tmp_path}/nothing.sock", health=health)
        async with asyncio.timeout(DEADLINE_S), registered(registry):
            await until(lambda: not health.is_up)


@asynccontextmanager
async def registered(registry: WorkerRegistry) -> AsyncIterator[None]:
    """Keep a worker registered until the block ends."""
    beating = asyncio.create_task(keep_registered(registry, record(), lambda role: None))
    try:
        yield
    finally:
        beating.cancel()
        with suppress(asyncio.CancelledError):
            await beating


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def num_registered(caplog: pytest.LogCaptureFixture) -> int:
    """Return how often a worker was logged as registered."""
    return sum("is registered in Redis" in each.getMessage() for each in caplog.records)


async def lapse(redis: Redis) -> float:
    """Return when w0's entry lapses, in milliseconds of the server's clock."""
    while (score := await redis.zscore("{test:workers}:lapse", "w0")) is None:
        await asyncio.sleep(0.01)
    return float(score)


TEXT = st.text(max_size=10)


@given(TEXT, st.integers(1, 2**64 - 1), TEXT, TEXT, st.integers(0, 2**40))
def test_records_round_trip_as_json(name: str, incarnation: int, model: str, layout: str, length: int) -> None:
    original = replace(record(name, incarnation), model=model, layout=layout, max_model_len=length)
    assert WorkerRecord.from_json(original.to_json()) == original
    newer = {**json.loads(original.to_json()), "a field of tomorrow": [1]}
    assert WorkerRecord.from_json(json.dumps(newer).encode()) == original


def test_labels_are_there_only_where_they_were_set() -> None:
    labelled = replace(record(), topology=Topology("host-1", "", "zone-a"), lanes=("standard", "batch"))
    assert WorkerRecord.from_json(labelled.to_json()) == labelled
    assert not {"host", "rack", "zone", "lanes"} & json.loads(record().to_json()).keys()
    with pytest.raises(ValueError, match=r"."):
        WorkerRecord.from_json(json.dumps({**json.loads(labelled.to_json()), "rack": 7}))


def test_every_field_is_checked() -> None:
    content = json.loads(record().to_json())
    wrongs: list[object] = [None, [], True, -1]
    for name, wrong in itertools.product(content, wrongs):
        with pytest.raises(ValueError, match=r"."):
            WorkerRecord.from_json(json.dumps({**content, name: wrong}))
        with pytest.raises(ValueError, match=r"."):
            WorkerRecord.from_json(json.dumps({k: v for k, v in content.items() if k != name}))


@pytest.mark.parametrize("text", ["", "[]", "3", b"\xff", "{", '"text"'])
def test_garbage_is_a_record_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        WorkerRecord.from_json(text)


def test_other_urls_are_refused() -> None:
    with pytest.raises(TandemError, match="scheme"):
        RedisClient("http://127.0.0.1")
