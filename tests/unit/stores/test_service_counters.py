"""Test the exchange of service totals between gateways on a real server, and without one."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from redis.asyncio import Redis

from tandem.admission.request_queue import ModelFlow, RequestQueue
from tandem.admission.tenant_queue import FlowKey
from tandem.core.ids import GatewayId, TenantId
from tandem.core.lane import Lane
from tandem.gateway.tenants.fairness_sync import FairnessSync
from tandem.stores.embedded_redis import EmbeddedServer
from tandem.stores.redis_client import StoreUnavailable
from tandem.stores.service_counters import TTL_S, ServiceCounters
from tests.unit.admission.requests import request

ACME = ModelFlow("m", FlowKey(Lane.BATCH, TenantId("acme: {☃}")))
_numbers = itertools.count()
GLOBEX = ModelFlow("m", FlowKey(Lane.INTERACTIVE, TenantId("globex")))


def counters(url: str, gateway: str, namespace: str) -> ServiceCounters:
    return ServiceCounters(url, namespace, GatewayId(gateway))


async def test_an_exchange_returns_what_others_served_since_the_last_one(redis_url: str) -> None:
    one, other = counters(redis_url, "g1", "each"), counters(redis_url, "g2", "each")
    assert await one.exchange([(ACME, 100)]) == []
    assert await other.exchange([]) == [], "totals before the first exchange do not count"
    assert await one.exchange([(ACME, 150), (GLOBEX, 7)]) == []
    assert sorted(await other.exchange([(GLOBEX, 3)])) == sorted([(ACME, 50), (GLOBEX, 7)])
    assert await other.exchange([(GLOBEX, 3)]) == []
    assert await one.exchange([(ACME, 140), (GLOBEX, 7)]) == [(GLOBEX, 3)]
    assert await other.exchange([(GLOBEX, 3)]) == [(ACME, -10)], "a refunded charge"
    third = counters(redis_url, "g3", "each")
    assert await third.exchange([]) == []
    await third.exchange([(ACME, 1)])
    assert await one.exchange([]) == [(ACME, 1)], "a later gateway's totals count from its start"
    for each in (one, other, third):
        await each.close()


async def test_what_another_version_wrote_is_left_out(redis_url: str, redis: Redis) -> None:
    one = counters(redis_url, "g1", "version")
    await one.exchange([])
    for name, text in (("g2", "no json"), ("g3", '[["m", 9, "x", 1]]'), ("g4", '{"a": 1}'), ("g5", "[[]]")):
        await redis.hset("{version:service}:totals", name, text)
    assert await one.exchange([]) == []
    await one.close()


async def test_without_a_server_a_request_queue_works_alone_and_recovers() -> None:
    with EmbeddedServer.start() as server:
        url = server.url
    gone = counters(url, "g1", "gone")
    with pytest.raises(StoreUnavailable):
        await gone.exchange([])
    sync = FairnessSync(RequestQueue(4), gone)
    await sync.start()
    await asyncio.sleep(0)
    await sync.stop()


async def test_two_request_queues_share_their_totals(redis_url: str) -> None:
    """A tenant that the other gateway has served much waits behind a tenant that no gateway has served."""
    queues = [RequestQueue(10), RequestQueue(10)]
    syncs = [FairnessSync(queue, counters(redis_url, f"g{i}", "queues")) for i, queue in enumerate(queues)]
    for sync in syncs:
        await sync.start()
    try:
        async with asyncio.timeout(20):
            while not _prefers_globex(queues[1]):
                _serve(queues[0])
                await asyncio.sleep(0.01)
    finally:
        for sync in syncs:
            await sync.stop()


async def test_the_charge_for_kv_time_reaches_the_other_gateway(redis_url: str) -> None:
    """A tenant whose request has few tokens and holds much KV at one gateway waits at the other one."""
    queues = [RequestQueue(10, kv_time_tokens=40.0), RequestQueue(10, kv_time_tokens=40.0)]
    here, there = (counters(redis_url, f"g{i}", "kv") for i in range(2))
    await here.exchange(queues[0].served())
    await there.exchange(queues[1].served())
    held = request("held", "acme", 10)
    queues[0].enter(held, queues[0].item_for(held, 1.0))
    queues[0].send(held.id)
    _serve(queues[1], "globex", 100)
    assert await _others(here, there, queues) == 10 and not _prefers_globex(queues[1])
    queues[0].charge_kv_time(held.id, 50_000.0)
    assert await _others(here, there, queues) == 1990 and _prefers_globex(queues[1])
    await here.close()
    await there.close()


async def _others(here: ServiceCounters, there: ServiceCounters, queues: list[RequestQueue]) -> int:
    """Exchange once at both gateways, and return what the second one has learnt of the first one."""
    await here.exchange(queues[0].served())
    fresh = await there.exchange(queues[1].served())
    for service, num_tokens in fresh:
        queues[1].add_remote_usage(service, num_tokens)
    return sum(num_tokens for _, num_tokens in fresh)


def _serve(queue: RequestQueue, tenant: str = "acme", num_tokens: int = 1000) -> None:
    served = request(f"r{next(_numbers)}", tenant, num_tokens)
    queue.enter(served, queue.item_for(served, 1.0))
    queue.send(served.id)
    queue.leave(served.id)


def _prefers_globex(queue: RequestQueue) -> bool:
    """Return whether of two equal requests the later one, of the tenant globex, is first."""
    requests = [request(f"p{next(_numbers)}", tenant, 10) for tenant in ("acme", "globex")]
    for one in requests:
        assert queue.enter(one, queue.item_for(one, 1.0)) is None
    first = queue.first("m")
    for one in requests:
        queue.withdraw(one.id)
    return first == requests[1].id


async def test_totals_are_kept_for_a_while(redis_url: str, redis: Redis) -> None:
    """The totals of a gateway that misses an exchange or two stay."""
    one = counters(redis_url, "g1", "kept")
    await one.exchange([(ACME, 1)])
    assert TTL_S / 2 < await redis.pttl("{kept:service}:totals") / 1000 <= TTL_S
    await one.close()
