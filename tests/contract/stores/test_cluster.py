"""Stores on a Redis Cluster whose slots move, of which one node stands still or all are gone, or that is taken for a
single server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from tandem.admission.quota import QuotaLimits, Reservation
from tandem.core.errors import TandemError
from tandem.core.ids import GatewayId, TenantId
from tandem.stores.quota_store import GatewayRegistry, RedisQuotas
from tandem.stores.redis_client import RedisClient, RedisHealth, StoreUnavailable
from tests.contract.stores.redis_servers import ClusterServers, TcpServer, tcp_server
from tests.contract.stores.test_loss import Stores, healed

pytestmark = pytest.mark.redis
LIMITS = QuotaLimits(tokens_per_minute=1000)
TENANTS = [TenantId(f"t{number}") for number in range(12)]


@pytest.fixture
def empty(cluster: ClusterServers) -> Iterator[ClusterServers]:
    cluster.empty()
    yield cluster
    cluster.empty()


@pytest.fixture
async def quotas(empty: ClusterServers) -> AsyncIterator[RedisQuotas]:
    quotas = RedisQuotas(empty.url, "c", answer_s=30.0)
    yield quotas
    await quotas.close()


def books(tenant: TenantId) -> str:
    return f"c:quota:{{{tenant}}}:levels"


def elsewhere(cluster: ClusterServers, key: str) -> TcpServer:
    return next(node for node in cluster.nodes if node is not cluster.owner(key))


async def reserve_all(quotas: RedisQuotas, name: str) -> list[str]:
    verdicts = await asyncio.gather(*(quotas.reserve(t, LIMITS, Reservation(name, 1, 100)) for t in TENANTS))
    return [verdict.refused for verdict in verdicts]


async def test_a_slot_that_has_moved_is_followed(empty: ClusterServers, quotas: RedisQuotas) -> None:
    assert not any(await reserve_all(quotas, "a"))
    empty.empty()
    other = elsewhere(empty, books(TENANTS[0]))
    empty.move(books(TENANTS[0]), other)
    assert not any(await reserve_all(quotas, "b"))
    with other.client() as client:
        assert client.exists(books(TENANTS[0]))


async def test_a_key_of_a_migrating_slot_is_read_at_its_new_node(empty: ClusterServers, quotas: RedisQuotas) -> None:
    """Scripts of several keys must wait for the end of it: Redis answers TRYAGAIN."""
    roll = GatewayRegistry(empty.url, "c", ttl_s=60.0)
    for key in ("{c:gateways}:roll", books(TENANTS[1])):
        empty.open(key, elsewhere(empty, key))
    assert await roll.beat(GatewayId("g1")) == 1 and await roll.beat(GatewayId("g2")) == 2
    with pytest.raises(StoreUnavailable):
        await quotas.reserve(TENANTS[1], LIMITS, Reservation("b", 1, 100))
    empty.empty()
    for key in ("{c:gateways}:roll", books(TENANTS[1])):
        empty.move(key, elsewhere(empty, key))
    assert not any(await reserve_all(quotas, "c")) and await roll.beat(GatewayId("g1")) == 1
    await roll.close()


async def test_a_node_that_stands_still_takes_nobody_else_along(empty: ClusterServers) -> None:
    """Within the time that a request waits for its quota, and heals when it goes on."""
    health = RedisHealth()
    quotas = RedisQuotas(empty.url, "c", health=health)
    still = empty.owner(books(TENANTS[0]))
    others = [tenant for tenant in TENANTS if empty.owner(books(tenant)) is not still]
    await reserve_all(quotas, "a")
    still.pause()
    try:
        with pytest.raises(StoreUnavailable):
            await quotas.reserve(TENANTS[0], LIMITS, Reservation("b", 1, 100))
        assert not health.is_up and health.num_errors["quota"] == 1
        assert not (await healed(lambda: quotas.reserve(others[0], LIMITS, Reservation("b", 1, 100)))).refused
    finally:
        still.resume()
    assert not any(await healed(lambda: reserve_all(quotas, "b")))
    assert health.is_up
    await quotas.close()


async def test_a_cluster_node_in_single_mode_is_an_error_that_names_the_setting(empty: ClusterServers) -> None:
    health = RedisHealth()
    quotas = RedisQuotas(empty.nodes[0].url, "c", health=health)
    foreign = next(tenant for tenant in TENANTS if empty.owner(books(tenant)) is not empty.nodes[0])
    with pytest.raises(StoreUnavailable, match=r"redis\+cluster://"):
        await quotas.reserve(foreign, LIMITS, Reservation("a", 1, 1))
    assert "redis+cluster://" in (health.problem or "")
    await quotas.close()


async def test_a_single_server_in_cluster_mode_is_an_error() -> None:
    with tcp_server() as server:
        client = RedisClient(server.url.replace("redis://", "redis+cluster://"))
        with pytest.raises(Exception, match="Cluster mode is not enabled"):
            await client.execute("GET", "x")
        await client.aclose()


@pytest.mark.parametrize("url", ["redis+cluster://", "redis+cluster://h:1/3", "nothing://h", "redis+cluster://h:x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(TandemError, match=r"redis\.url"):
        RedisClient(url)


async def test_the_loss_of_a_whole_cluster_is_logged_like_that_of_one_server(empty: ClusterServers) -> None:
    """By those whom it answered before, by those who come when it is away, and by those who had to leave it."""
    known, new = Stores(empty.url), Stores(empty.url)
    for _, _, call in known.calls():
        await call()
    for node in empty.nodes:
        node.stop()
    try:
        for stores in (known, known, new):
            for store, error, call in stores.calls():
                with pytest.raises(error, match=r"ConnectionError|TimeoutError"):
                    await call()
                assert stores.health.num_errors[store]
    finally:
        for node in empty.nodes:
            node.start()
    for stores in (known, new):
        for _, error, call in stores.calls():
            await healed(call, error)
        assert stores.health.is_up
        await stores.close()
