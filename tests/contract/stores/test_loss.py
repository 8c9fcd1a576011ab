"""A Redis that is lost in each way it can be: each store says so in its words, it is logged once, and all heals."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest

from tandem.admission.quota import QuotaLimits, Reservation
from tandem.admission.tenant import Tenant
from tandem.core.clock import SystemClock
from tandem.core.ids import GatewayId, TenantId
from tandem.gateway.tenants.quotas import TenantQuotas
from tandem.stores.prefix_index import IndexSnapshot, IndexWriter
from tandem.stores.quota_store import GatewayRegistry, RedisQuotas
from tandem.stores.redis_client import RedisClient, RedisHealth, StoreUnavailable
from tandem.stores.service_counters import ServiceCounters
from tandem.stores.worker_registry import WorkerRegistry
from tests.contract.stores.redis_servers import TcpServer, tcp_server
from tests.contract.stores.test_stores import record

pytestmark = pytest.mark.redis

ACME = TenantId("acme")
TENANT = Tenant(id=ACME, tokens_per_minute=1_000_000)
LIMITS = QuotaLimits(tokens_per_minute=1_000_000)
SECRET = "wrong for everybody"
NOBODY = ("127.0.0.1", 1)


def execute(server: TcpServer, *commands: tuple[str | int, ...], password: str | None = None) -> None:
    with server.client(password) as client:
        for command in commands:
            client.execute_command(*command)  # type: ignore[no-untyped-call]


def lock_out(server: TcpServer) -> None:
    execute(server, ("CONFIG SET", "requirepass", SECRET), ("CLIENT KILL", "TYPE", "normal"))


def let_in(server: TcpServer) -> None:
    execute(server, ("CONFIG SET", "requirepass", ""), password=SECRET)


T = TypeVar("T")
Call = Callable[[], Awaitable[Any]]
Fault = tuple[Callable[[TcpServer], None], Callable[[TcpServer], None], str]
FAULTS: dict[str, Fault] = {
    "ended": (TcpServer.stop, TcpServer.start, "ConnectionError"),
    "stopped": (TcpServer.pause, TcpServer.resume, "TimeoutError"),
    "locked": (lock_out, let_in, "Auth"),
    "demoted": (
        lambda server: execute(server, ("REPLICAOF", *NOBODY)),
        lambda server: execute(server, ("REPLICAOF", "NO", "ONE")),
        "ReadOnlyError",
    ),
    "full": (
        lambda server: execute(server, ("CONFIG SET", "maxmemory", 1)),
        lambda server: execute(server, ("CONFIG SET", "maxmemory", 0)),
        "OutOfMemory",
    ),
}
ALL = pytest.mark.parametrize("name", FAULTS)


class Stores:
    """One of each, with short patience."""

    def __init__(self, url: str) -> None:
        self.health = RedisHealth()
        self.registry = WorkerRegistry(url, "n", health=self.health)
        self.quotas = RedisQuotas(url, "n", health=self.health)
        self.counters = ServiceCounters(url, "n", GatewayId("g"), health=self.health)
        self.roll = GatewayRegistry(url, "n", ttl_s=60.0, health=self.health)
        self.index = IndexWriter(url, "n", record("w").worker, health=self.health)
        self._numbers = iter(range(1_000_000))

    def calls(self) -> list[tuple[str, type[Exception], Call]]:
        snapshot = IndexSnapshot(record("w").worker.incarnation, 1, 4, array("Q", [1]))
        return [
            ("registry", StoreUnavailable, lambda: self.registry.publish(record("w"))),
            ("quota", StoreUnavailable, self._reserve),
            ("roll", StoreUnavailable, lambda: self.roll.beat(GatewayId("g"))),
            ("service", StoreUnavailable, lambda: self.counters.exchange([])),
            ("index", StoreUnavailable, lambda: self.index.write(snapshot)),
        ]

    def _reserve(self) -> Awaitable[Any]:
        return self.quotas.reserve(ACME, LIMITS, Reservation(f"r{next(self._numbers)}", 1, 1))

    async def close(self) -> None:
        for store in (self.registry, self.quotas, self.counters, self.roll, self.index):
            await store.close()  # type: ignore[attr-defined]


@pytest.fixture
def server() -> Iterator[TcpServer]:
    with tcp_server() as server:
        yield server


@pytest.fixture
async def stores(server: TcpServer) -> AsyncIterator[Stores]:
    stores = Stores(server.url)
    yield stores
    await stores.close()


async def healed(call: Callable[[], Awaitable[T]], error: type[Exception] = StoreUnavailable) -> T:
    """Call until somebody answers."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except error:
                await asyncio.sleep(0.01)


def tenant_quotas(server: TcpServer, health: RedisHealth) -> TenantQuotas:
    store = RedisQuotas(server.url, "n", health=health)
    roll = GatewayRegistry(server.url, "n", ttl_s=60.0, health=health)
    return TenantQuotas(GatewayId("g"), store, roll, SystemClock())


def num_unsettled(server: TcpServer) -> int:
    with server.client() as client:
        return int(client.hlen(f"n:quota:{{{ACME}}}:open"))


@ALL
async def test_each_store_reports_the_loss_and_heals(
    name: str, server: TcpServer, stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tandem")
    lose, heal, problem = FAULTS[name]
    calls = stores.calls()
    for _, _, call in calls:
        await call()
    lose(server)
    answers = await asyncio.gather(*(call() for _, _, call in calls), return_exceptions=True)
    kinds = [type(answer) for answer in answers if isinstance(answer, BaseException)]
    # A full server lets a script write what frees something first, as the roll does.
    assert kinds == [error for store, error, _ in calls if (name, store) != ("full", "roll")]
    assert all(problem in str(answer) for answer in answers if isinstance(answer, BaseException)), answers
    assert not stores.health.is_up and stores.health.num_errors.total() == len(kinds)
    heal(server)
    for _, error, call in calls:
        await healed(call, error)
    assert stores.health.is_up and stores.health.problem is None
    words = [one.getMessage() for one in caplog.records if one.name.startswith("tandem")]
    assert len(words) == 2 and words[0].startswith("Redis fails") and words[1] == "Redis answers again", words
    assert [one.worker.id for one in await stores.registry.list()] == ["w"]


@ALL
async def test_no_request_fails_or_is_kept_from_its_place(name: str, server: TcpServer) -> None:
    """Of those that come while Redis is lost only the first ones ask it: after that only the steward does, now and
    then, until it answers."""
    lose, heal, _ = FAULTS[name]
    health = RedisHealth()
    quotas = tenant_quotas(server, health)
    await quotas.start()
    entries = [await quotas.enter(TENANT, 10, 10)]
    lose(server)
    entries += await asyncio.gather(*(quotas.enter(TENANT, 10, 10) for _ in range(50)))
    assert not quotas.is_reachable
    num_before = health.num_errors["quota"]
    entries += await asyncio.gather(*(quotas.enter(TENANT, 10, 10) for _ in range(50)))
    assert health.num_errors["quota"] < num_before + 10, "a lost Redis is asked for each request"
    heal(server)
    async with asyncio.timeout(60):
        while not (quotas.is_reachable and health.is_up):
            await asyncio.sleep(0.01)
    assert len(quotas.entries) == 101
    for entry in entries:
        entry.close()
    await quotas.stop()
    assert num_unsettled(server) == 0


async def test_a_connection_to_a_primary_that_was_demoted_is_given_up(server: TcpServer) -> None:
    """An address may lead to the new primary by now; a connection that stays open leads to the old one for ever."""
    client = RedisClient(server.url)
    before = await client.execute("CLIENT ID")
    FAULTS["demoted"][0](server)
    with pytest.raises(Exception, match="replica"):
        await client.execute("SET", "key", 1)
    assert await client.execute("CLIENT ID") != before
    await client.aclose()


@ALL
async def test_what_was_not_settled_is_tried_once_more_at_the_end(name: str, server: TcpServer) -> None:
    lose, heal, _ = FAULTS[name]
    quotas = tenant_quotas(server, RedisHealth())
    await quotas.start()
    async with asyncio.timeout(60):
        entry = await quotas.enter(TENANT, 10, 10)
        while not entry.is_shared:  # on a busy machine Redis may take longer than a gateway waits for it
            entry.close()
            await asyncio.sleep(0.1)
            entry = await quotas.enter(TENANT, 10, 10)

    def is_settled() -> bool:
        """Return whether a full server, which executes a script whose first write frees memory, has settled it."""
        return name == "full" and num_unsettled(server) == 0

    lose(server)
    entry.close()
    async with asyncio.timeout(60):
        while quotas.is_reachable and not is_settled():
            await asyncio.sleep(0.01)
    heal(server)
    await quotas.stop()
    assert num_unsettled(server) == 0
