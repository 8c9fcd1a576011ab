"""Gateways that tell each other what they have served, on a real server, and without one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from tandem.admission.queue_item import FlowKey
from tandem.admission.request_queue import ModelFlow, RequestQueue
from tandem.core.ids import GatewayId, RequestId, TenantId
from tandem.core.lane import Lane
from tandem.core.request import Request, SamplingParams
from tandem.gateway.fairness_sync import FairnessSync
from tandem.stores.embedded_redis import EmbeddedServer
from tandem.stores.redis_client import connect
from tandem.stores.service_counters import TTL_S, CountersUnavailable, ServiceCounters

ACME = ModelFlow("m", FlowKey(Lane.BATCH, TenantId("acme: {☃}")))
_numbers = itertools.count()
GLOBEX = ModelFlow("m", FlowKey(Lane.INTERACTIVE, TenantId("globex")))


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedServer.start() as server:
        yield server.url


def counters(url: str, gateway: str, namespace: str) -> ServiceCounters:
    return ServiceCounters(url, namespace, GatewayId(gateway))


async def test_each_hears_what_the_others_served_since_it_last_asked(redis_url: str) -> None:
    one, other = counters(redis_url, "g1", "each"), counters(redis_url, "g2", "each")
    assert await one.exchange([(ACME, 100)]) == []
    assert await other.exchange([]) == [], "what was before the first exchange is no debt of anybody's"
    assert await one.exchange([(ACME, 150), (GLOBEX, 7)]) == []
    assert sorted(await other.exchange([(GLOBEX, 3)])) == sorted([(ACME, 50), (GLOBEX, 7)])
    assert await other.exchange([(GLOBEX, 3)]) == []
    assert await one.exchange([(ACME, 140), (GLOBEX, 7)]) == [(GLOBEX, 3)]
    assert await other.exchange([(GLOBEX, 3)]) == [(ACME, -10)], "a charge that was taken back"
    third = counters(redis_url, "g3", "each")
    assert await third.exchange([]) == []
    await third.exchange([(ACME, 1)])
    assert await one.exchange([]) == [(ACME, 1)], "one that comes later is heard from its beginning"
    for each in (one, other, third):
        await each.close()


async def test_what_another_version_wrote_is_left_out(redis_url: str) -> None:
    one = counters(redis_url, "g1", "version")
    await one.exchange([])
    redis = connect(redis_url)
    for name, text in (("g2", "no json"), ("g3", '[["m", 9, "x", 1]]'), ("g4", '{"a": 1}'), ("g5", "[[]]")):
        await redis.hset("{version:service}:totals", name, text)  # type: ignore[misc]
    assert await one.exchange([]) == []
    await redis.aclose()
    await one.close()


async def test_without_a_server_a_line_goes_on_alone_and_heals() -> None:
    with EmbeddedServer.start() as server:
        url = server.url
    gone = counters(url, "g1", "gone")
    with pytest.raises(CountersUnavailable):
        await gone.exchange([])
    share = FairnessSync(RequestQueue(4), gone)
    await share.start()
    await asyncio.sleep(0)
    await share.stop()


async def test_two_lines_know_of_each_other(redis_url: str) -> None:
    """A tenant that the other gateway has served much waits behind one that nobody has."""
    lines = [RequestQueue(10), RequestQueue(10)]
    shares = [FairnessSync(line, counters(redis_url, f"g{i}", "lines")) for i, line in enumerate(lines)]
    for share in shares:
        await share.start()
    try:
        async with asyncio.timeout(20):
            while not _knows(lines[1], _serve(lines[0])):
                await asyncio.sleep(0.01)
    finally:
        for share in shares:
            await share.stop()
    for name, tenant in (("first", "acme"), ("second", "globex")):
        request = _request(name, tenant, 10)
        assert lines[1].enter(request, lines[1].item_for(request, 1.0)) is None
    assert lines[1].first("m") == "second"


def _serve(line: RequestQueue) -> ModelFlow:
    request = _request(f"r{next(_numbers)}", "acme", 1000)
    line.enter(request, line.item_for(request, 1.0))
    line.send(request.id)
    line.leave(request.id)
    return ModelFlow("m", FlowKey(request.lane, request.tenant))


def _knows(line: RequestQueue, service: ModelFlow) -> bool:
    return line.counter(service) > 0


def _request(name: str, tenant: str, num_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=1)
    return Request(
        id=RequestId(name), model="m", prompt_tokens=(1,) * num_tokens, sampling=sampling, tenant=TenantId(tenant)
    )


async def test_totals_are_kept_for_a_while(redis_url: str) -> None:
    """A gateway that misses an exchange or two is not forgotten."""
    one = counters(redis_url, "g1", "kept")
    await one.exchange([(ACME, 1)])
    redis = connect(redis_url)
    assert TTL_S / 2 < await redis.pttl("{kept:service}:totals") / 1000 <= TTL_S
    await redis.aclose()
    await one.close()
