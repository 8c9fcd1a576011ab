"""A primary of a Redis Cluster dies: its replica is found, with all that was written, and nobody else's keys wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tandem.admission.quota import CONCURRENCY, QuotaLimits, Reservation
from tandem.core.ids import GatewayId, TenantId, WorkerId
from tandem.stores.prefix_index import IndexReader
from tandem.stores.quota_store import GatewayRegistry, RedisQuotas
from tandem.stores.redis_client import RedisHealth, StoreUnavailable
from tests.contract.stores.conftest import started
from tests.contract.stores.redis_servers import FAILOVER, ClusterServers, TcpServer
from tests.contract.stores.test_loss import healed

pytestmark = pytest.mark.redis
LIMITS = QuotaLimits(max_concurrency=2)
TTL_S = 600.0


@pytest.fixture
def failing() -> Iterator[ClusterServers]:
    yield from started(*FAILOVER)


def named(cluster: ClusterServers, owner: TcpServer, key: Callable[[str], str], *, not_there: bool = False) -> str:
    """A name with which the key is on that node, or is not."""
    names = (f"n{number}" for number in range(1000))
    return next(name for name in names if (cluster.owner(key(name)) is owner) is not not_there)


def books(tenant: str) -> str:
    return f"f:quota:{{{tenant}}}:levels"


async def test_what_was_written_is_found_where_the_replica_took_over(failing: ClusterServers) -> None:
    primary = failing.nodes[1]
    ours = TenantId(named(failing, primary, books))
    others = TenantId(named(failing, primary, books, not_there=True))
    place = named(failing, primary, lambda name: f"{{{name}:gateways}}:roll")
    health = RedisHealth()
    quotas = RedisQuotas(failing.url, "f", ttl_s=TTL_S, health=health)
    roll = GatewayRegistry(failing.url, place, ttl_s=TTL_S, health=health)
    reader = IndexReader(failing.url, place, health=health)
    for name in ("a", "b"):
        assert not (await quotas.reserve(ours, LIMITS, Reservation(name, 1, 1))).refused
    assert await roll.beat(GatewayId("g1")) == 1 and await reader.read() == ([], False)
    failing.replica(primary)
    primary.stop()

    with pytest.raises(StoreUnavailable):
        await quotas.reserve(ours, LIMITS, Reservation("c", 1, 1))
    assert not health.is_up
    await healed(lambda: quotas.reserve(others, LIMITS, Reservation("a", 1, 1)))
    verdict = await healed(lambda: quotas.reserve(ours, LIMITS, Reservation("c", 1, 1)))
    assert verdict.refused == CONCURRENCY
    assert await healed(lambda: roll.beat(GatewayId("g2"))) == 2
    assert await healed(reader.read) == ([], False) and await healed(lambda: reader.snapshot(WorkerId("w"))) is None
    assert health.is_up

    # It comes back and finds that it is a replica now.
    primary.start()
    for name in ("a", "b"):
        await healed(lambda name=name: quotas.settle(ours, LIMITS, name, 1))  # type: ignore[misc]
    assert not (await healed(lambda: quotas.reserve(ours, LIMITS, Reservation("d", 1, 1)))).refused
    for store in (quotas, roll, reader):
        await store.close()
