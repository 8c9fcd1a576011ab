"""Test quotas of several gateways with one real Redis and without it: limits hold, and no reservation is left over."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tandem.admission.quota import RateLimitedError, Reservation
from tandem.admission.tenant import OPEN, Tenant
from tandem.admission.tenant_quota_state import QuotaReservation, TokenUsage
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import GatewayId, TenantId
from tandem.gateway.context.rate_limits import rate_limit_headers
from tandem.gateway.tenants import quotas as quotas_module
from tandem.gateway.tenants.quotas import TenantQuotas
from tandem.stores.quota_store import GatewayRegistry, RedisQuotas
from tandem.stores.redis_client import RedisClient, StoreUnavailable
from tests.e2e.gateway.processes import Redis as RedisServer
from tests.unit.gateway.scripted_worker import until

_names = itertools.count(1)
pytestmark = pytest.mark.redis


class Time:
    """Hold the clock of all gateways and of their Redis; it advances only when the test sets it."""

    def __init__(self) -> None:
        self.ms = 1_795_000_000_000

    def now(self) -> float:
        return self.ms / 1000


class Gateways:
    """Own the quotas of gateways that share one Redis and one clock. `keep` starts their background tasks."""

    def __init__(self, url: str) -> None:
        self.time = Time()
        self.namespace = f"n{next(_names)}"
        self.url = url
        self.made: list[TenantQuotas] = []
        # However busy this machine is, a server that is well has answered by then.
        self.answer_s = 30.0

    def add(self, url: str | None = None) -> TenantQuotas:
        url = url or self.url
        store = RedisQuotas(url, self.namespace, answer_s=self.answer_s, now_ms=lambda: self.time.ms)
        roll = GatewayRegistry(url, self.namespace, ttl_s=store.ttl_s)
        self.made.append(TenantQuotas(GatewayId(f"g{len(self.made)}"), store, roll, self.time))
        return self.made[-1]

    async def pair(self) -> tuple[TenantQuotas, TenantQuotas]:
        one, two = self.add(), self.add()
        for _ in range(2):
            await one._heartbeat()
            await two._heartbeat()
        return one, two

    async def keys(self) -> list[bytes]:
        async with RedisClient(self.url).redis as redis:
            return sorted(await redis.keys(f"{self.namespace}:quota:*"))

    async def num_open(self, tenant: Tenant) -> int:
        async with RedisClient(self.url).redis as redis:
            return int(await redis.hlen(f"{self.namespace}:quota:{{{tenant.id}}}:open"))  # type: ignore[misc]


@pytest.fixture
async def gateways(redis_url: str) -> AsyncIterator[Gateways]:
    gateways = Gateways(redis_url)
    yield gateways
    for quotas in gateways.made:
        await quotas.stop()


@pytest.fixture
def server(gateways: Gateways) -> Iterator[RedisServer]:
    """Run a Redis of the gateways' own that can be stopped, with a path short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="tq-", dir="/tmp") as directory:
        server = RedisServer(Path(directory))
        server.start()
        gateways.url = server.url
        yield server
        server.stop()


def tenant(**limits: int) -> Tenant:
    return Tenant(id=TenantId("acme"), **limits)  # type: ignore[arg-type]


async def enter(quotas: TenantQuotas, who: Tenant, prompt: int = 1, output: int = 0) -> QuotaReservation:
    entry = await quotas.enter(who, prompt, output)
    assert isinstance(entry, QuotaReservation)
    return entry


def end(entry: QuotaReservation, used: TokenUsage) -> None:
    """Close the reservation of a request that has used these tokens."""
    entry.watch(lambda: used)
    entry.close()


def headers(found: QuotaReservation | RateLimitedError) -> dict[str, str]:
    return rate_limit_headers(found.levels, found.limits)


def num_left(found: QuotaReservation | RateLimitedError, quantity: str) -> int:
    return int(headers(found)[f"x-ratelimit-remaining-{quantity}"])


async def refusal(quotas: TenantQuotas, who: Tenant, prompt: int = 1, output: int = 0) -> TandemError:
    with pytest.raises(TandemError) as refused:
        await quotas.enter(who, prompt, output)
    return refused.value


def hurry(quotas: TenantQuotas, answer_s: float = 0.1) -> None:
    """Shorten the timeout for a server that does not answer in any case."""
    store: Any = quotas._store
    store._calls._redis.answer_s = answer_s


async def num_admitted(calls: list[Callable[[], object]]) -> int:
    """Return how many of `calls`, all made at once, are admitted."""
    answers = await asyncio.gather(*(call() for call in calls), return_exceptions=True)  # type: ignore[call-overload]
    refused = [answer for answer in answers if isinstance(answer, TandemError)]
    assert all(error.kind is ErrorKind.QUOTA for error in refused)
    entries = [answer for answer in answers if isinstance(answer, QuotaReservation)]
    assert len(entries) + len(refused) == len(calls), [a for a in answers if a not in entries and a not in refused]
    return len(entries)


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"requests_per_minute": 120}, 120),
        ({"tokens_per_minute": 14_000}, 140),
        ({"max_concurrency": 64}, 64),
        ({"requests_per_minute": 100, "tokens_per_minute": 14_000, "max_concurrency": 90}, 90),
    ],
    ids=str,
)
async def test_two_gateways_never_admit_more_than_the_quota(
    gateways: Gateways, limits: dict[str, int], most: int
) -> None:
    """The count must be exact: 2,400 decisions over all cases, those of a case at once in several pipelines, 100
    tokens each.
    """
    pair = await gateways.pair()
    who = tenant(**limits)
    calls = [lambda quotas=quotas: quotas.enter(who, 100, 0) for quotas in pair for _ in range(300)]
    assert await num_admitted(calls) == most  # type: ignore[arg-type]
    assert await gateways.num_open(who) == most
    gateways.time.ms += 6_000
    calls = calls[::20]
    brought = {"requests_per_minute": 12, "tokens_per_minute": 14}
    more = min(brought[name] for name in limits if name in brought) if "max_concurrency" not in limits else 0
    assert await num_admitted(calls) == min(len(calls), more)  # type: ignore[arg-type]


async def test_a_refusal_names_its_limit_and_the_retry_time(gateways: Gateways) -> None:
    quotas = gateways.add()
    who = tenant(requests_per_minute=6, tokens_per_minute=600, max_concurrency=1)
    entry = await enter(quotas, who, 300)
    assert headers(entry) == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "5",
        "x-ratelimit-reset-requests": "10s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "300",
        "x-ratelimit-reset-tokens": "30s",
    }
    error = await refusal(quotas, who)
    assert (error.kind, error.reason, error.retry_after_s) == (ErrorKind.QUOTA, "concurrency", 1.0)
    assert "1 requests at once" in error.message
    error = await refusal(quotas, who, 301)
    assert (error.reason, error.retry_after_s) == ("tokens_per_minute", 0.1)
    assert isinstance(error, RateLimitedError)
    assert (num_left(error, "requests"), num_left(error, "tokens")) == (5, 300)
    end(entry, TokenUsage(300, 0))
    for _ in range(5):
        (await enter(quotas, who, 0)).close()
    # None of those began, so they count for nothing.
    for _ in range(5):
        end(await enter(quotas, who, 0), TokenUsage(0, 0))
    error = await refusal(quotas, who)
    assert (error.reason, error.retry_after_s) == ("requests_per_minute", 10.0)


async def test_a_request_larger_than_the_quota_is_refused_for_good(gateways: Gateways) -> None:
    error = await refusal(gateways.add(), tenant(tokens_per_minute=600), 601)
    assert (error.kind, error.retry_after_s, error.reason) == (ErrorKind.INVALID_REQUEST, None, "tokens_per_minute")
    assert "601" in error.message and "600" in error.message


@pytest.mark.parametrize(
    ("limits", "sizes", "reason"),
    [
        ({"max_concurrency": 4}, [(1, 1)] * 4, ""),
        ({"max_concurrency": 4}, [(1, 1)] * 5, "concurrency"),
        ({"requests_per_minute": 5}, [(1, 1)] * 5, ""),
        ({"requests_per_minute": 5}, [(1, 1)] * 6, "requests_per_minute"),
        ({"tokens_per_minute": 600}, [(200, 0)] * 3, ""),
        ({"tokens_per_minute": 600}, [(200, 0), (200, 0), (200, 1)], "tokens_per_minute"),
        ({"tokens_per_minute": 600}, [(44, 10_000), (44, 10_000)], ""),  # with the first guess at an output, 256
        ({"tokens_per_minute": 600}, [(44, 10_000), (45, 10_000)], "tokens_per_minute"),
        ({"tokens_per_minute": 600}, [(1, 0), (601, 0)], "tokens_per_minute"),
        ({"tokens_per_minute": 100}, [(1, 10_000)], ""),  # never more than a whole bucket
        ({"requests_per_minute": 1, "tokens_per_minute": 10, "max_concurrency": 1}, [(5, 5)], ""),
    ],
    ids=str,
)
async def test_several_prompts_found_feasible_are_admitted(
    gateways: Gateways, limits: dict[str, int], sizes: list[tuple[int, int]], reason: str
) -> None:
    """The key has used nothing; prompts that the check refuses would also be refused one by one."""
    quotas, who = gateways.add(), tenant(**limits)
    error: TandemError | None = None
    try:
        quotas.check_feasible(who, sizes)
    except TandemError as found:
        error = found
    assert await gateways.num_open(who) == 0
    answers = await asyncio.gather(*(quotas.enter(who, *size) for size in sizes), return_exceptions=True)
    assert (error is None) == all(isinstance(answer, QuotaReservation) for answer in answers) == (reason == "")
    if error is not None:
        assert (error.kind, error.retry_after_s, error.reason) == (ErrorKind.INVALID_REQUEST, None, reason)
        assert str(max(limits.values())) in error.message


async def test_feasibility_uses_the_output_of_earlier_requests(gateways: Gateways) -> None:
    quotas, who = gateways.add(), tenant(tokens_per_minute=600)
    for _ in range(20):
        end(await enter(quotas, who, 1, 100), TokenUsage(0, 0))
    quotas.check_feasible(who, [(100, 10_000)] * 3)


async def test_while_redis_is_away_several_prompts_are_not_refused_for_good(gateways: Gateways) -> None:
    """One gateway's part grows again as soon as Redis is back."""
    quotas, other = await gateways.pair()
    who = tenant(requests_per_minute=4)
    quotas._lose(ConnectionError())
    quotas.check_feasible(who, [(1, 1)] * 4)
    for _ in range(2):
        await enter(quotas, who)
    assert (await refusal(quotas, who)).kind is ErrorKind.QUOTA
    assert other.is_reachable


async def test_whoever_has_no_limits_costs_no_round_trip(gateways: Gateways) -> None:
    quotas = gateways.add("unix:///nowhere/at-all.sock")
    for who in (OPEN, tenant(), tenant(max_prompt_tokens=5)):
        quotas.check_feasible(who, [(10**9, 10**9)] * 1000)
        assert await quotas.enter(who, 10**9, 10**9) is None
    assert quotas.is_reachable


async def test_estimated_tokens_are_settled_with_the_used_ones(gateways: Gateways) -> None:
    one, two = await gateways.pair()
    who = tenant(tokens_per_minute=1000)
    entry = await enter(one, who, 400, 10_000)  # the prompt, and the first guess at an output
    assert num_left(entry, "tokens") == 1000 - 400 - 256
    end(entry, TokenUsage(100, 20))
    entry.close()
    assert num_left(await enter(one, who, 1), "tokens") == 1000 - 120 - 1
    entry = await enter(two, who, 1)
    entry.watch(lambda: TokenUsage(1, 1500))  # a debt
    entry.close()
    await asyncio.gather(*two._posted)
    error = await refusal(one, who, 1)
    assert error.reason == "tokens_per_minute" and error.retry_after_s == pytest.approx(
        (1 + 120 + 1 + 1501 - 1000) * 0.06
    )


async def test_a_heartbeat_keeps_reservations_and_reports_their_usage(gateways: Gateways) -> None:
    one, two = await gateways.pair()
    who = tenant(tokens_per_minute=60_000, max_concurrency=1)
    entry = await enter(one, who, 100)
    used = 0
    entry.watch(lambda: TokenUsage(100, used))
    for _ in range(12):
        gateways.time.ms += 5_000
        used += 1_000
        await one._heartbeat()
    assert (await refusal(two, who)).reason == "concurrency"
    gateways.time.ms += 20_000  # it reports nothing more: its last report stands
    left = num_left(await enter(two, who, 0), "tokens")
    # The last thousand was taken 20 s ago, and 20,000 came back since.
    assert left == 60_000
    assert await gateways.num_open(who) == 1


async def test_reservations_of_a_gateway_that_is_gone_are_settled_by_another(gateways: Gateways) -> None:
    one, two = await gateways.pair()
    who = tenant(tokens_per_minute=600, max_concurrency=3)
    entry = await enter(one, who, 500)
    entry.watch(lambda: TokenUsage(100, 0))
    await one._heartbeat()
    kept = await enter(two, who, 50)
    for ms, num_open in ((19_000, 2), (2_000, 1)):
        gateways.time.ms += ms
        await two._heartbeat()
        assert await gateways.num_open(who) == num_open
    assert kept in two.entries


async def test_a_stalled_gateway_reenters_reservations_that_were_settled_meanwhile(gateways: Gateways) -> None:
    one, two = await gateways.pair()
    who = tenant(tokens_per_minute=600)
    entry = await enter(one, who, 200)
    used = 150
    entry.watch(lambda: TokenUsage(used, 0))
    await one._heartbeat()
    gateways.time.ms += 20_000
    before = await enter(two, who, 1)  # sweeps; 450 + 200 back, full
    assert num_left(before, "tokens") == 599
    await one._heartbeat()
    # 50 of its 200 were not used yet when it was settled.
    assert num_left(await enter(two, who, 1), "tokens") == 599 - 50 - 1
    used = 180
    entry.close()
    await asyncio.gather(*one._posted)
    assert num_left(await enter(two, who, 1), "tokens") == 599 - 30 - 2


async def test_a_client_that_disconnects_while_the_quota_is_requested_costs_nothing(gateways: Gateways) -> None:
    quotas = gateways.add()
    who = tenant(requests_per_minute=10, tokens_per_minute=1000, max_concurrency=5)
    for spins in range(12):
        enter_task = asyncio.create_task(quotas.enter(who, 100, 0))
        for _ in range(spins):
            await asyncio.sleep(0)
        if not enter_task.cancel():
            (await enter_task).close()
        else:
            with pytest.raises(asyncio.CancelledError):
                await enter_task
    while quotas._posted:
        await asyncio.wait(quotas._posted)
    entry = await enter(quotas, who, 0)
    assert (num_left(entry, "requests"), num_left(entry, "tokens")) == (9, 1000)
    assert await gateways.num_open(who) == 1 and quotas.entries == [entry]


async def test_tenants_are_apart_and_each_one_is_in_one_slot(gateways: Gateways) -> None:
    quotas = gateways.add()
    for name in ("a", "b"):
        await enter(quotas, Tenant(id=TenantId(name), requests_per_minute=1))
    keys = await gateways.keys()
    assert len(keys) == 6 and {key.split(b"{")[1].split(b"}")[0] for key in keys} == {b"a", b"b"}


async def test_a_script_that_redis_forgot_is_loaded_again(gateways: Gateways) -> None:
    quotas = gateways.add()
    who = tenant(requests_per_minute=50)
    await enter(quotas, who)
    redis: Redis = RedisClient(gateways.url).redis
    await redis.script_flush()
    await redis.aclose()
    entries = await asyncio.gather(*(enter(quotas, who) for _ in range(20)))
    assert sorted(num_left(entry, "requests") for entry in entries) == list(range(29, 49))
    assert quotas.is_reachable


async def test_without_redis_each_gateway_admits_its_part(gateways: Gateways, server: RedisServer) -> None:
    one, two = await gateways.pair()
    who = tenant(requests_per_minute=100, max_concurrency=90)
    server.stop()
    calls = [lambda quotas=quotas: quotas.enter(who, 1, 0) for quotas in (one, two) for _ in range(100)]
    assert await num_admitted(calls) == 90  # type: ignore[arg-type]
    assert not one.is_reachable and not two.is_reachable
    assert len(one.entries) == len(two.entries) == 45
    error = await refusal(one, who)
    assert (error.kind, error.reason) == (ErrorKind.QUOTA, "concurrency")


async def test_alone_it_begins_where_the_shared_buckets_stood(gateways: Gateways, server: RedisServer) -> None:
    one, _ = await gateways.pair()
    who = tenant(tokens_per_minute=1000)
    assert num_left(await enter(one, who, 900), "tokens") == 100
    server.stop()
    assert num_left(await enter(one, who, 50), "tokens") == 0
    assert (await refusal(one, who, 50)).retry_after_s == 6.0  # 500 per minute is its part


async def test_alone_it_counts_what_was_open_before(gateways: Gateways, server: RedisServer) -> None:
    one, _ = await gateways.pair()
    who = tenant(max_concurrency=10)
    before = [await enter(one, who) for _ in range(4)]
    server.stop()
    await enter(one, who)
    assert (await refusal(one, who)).reason == "concurrency"  # five are its part
    before.pop().close()
    await enter(one, who)
    assert (await refusal(one, who)).reason == "concurrency"


async def test_alone_a_request_may_be_larger_than_the_part_of_one_gateway(
    gateways: Gateways, server: RedisServer
) -> None:
    one, _ = await gateways.pair()
    who = tenant(tokens_per_minute=1000)
    server.stop()
    entry = await enter(one, who, 900)
    assert headers(entry)["x-ratelimit-limit-tokens"] == "500"
    end(entry, TokenUsage(900, 0))
    assert (await refusal(one, who, 1)).retry_after_s == pytest.approx(401 * 0.12)


async def test_usage_without_redis_is_reported_when_redis_is_back(gateways: Gateways, server: RedisServer) -> None:
    one, two = await gateways.pair()
    who = tenant(requests_per_minute=100, tokens_per_minute=1000, max_concurrency=10)
    shared = await enter(one, who, 100)
    shared.watch(lambda: TokenUsage(100, 0))
    server.stop()
    alone = [await enter(one, who, 100) for _ in range(3)]
    for entry in alone:
        entry.watch(lambda: TokenUsage(80, 0))
    alone[0].close()
    alone[0].close()
    server.start()  # and has forgotten all
    await one._heartbeat()
    await two._heartbeat()
    assert one.is_reachable
    await asyncio.gather(*one._posted)
    # `shared`, entered again, two that are open, and 80 of the one that has ended.
    assert await gateways.num_open(who) == 3
    entry = await enter(two, who, 0)
    assert num_left(entry, "tokens") == 1000 - 3 * 100 - 80
    for each in (shared, *alone[1:], entry):
        each.close()
    await asyncio.gather(*one._posted, *two._posted)
    assert await gateways.num_open(who) == 0
    last = await enter(two, who, 0)
    assert num_left(last, "tokens") == 1000 - 100 - 3 * 80
    assert one.entries == [] and two.entries == [last]


async def test_a_gateway_stays_local_while_the_shared_buckets_do_not_answer(
    gateways: Gateways, server: RedisServer
) -> None:
    """The gateway roll may still answer: in a cluster another node has it, and a full server still accepts removals."""
    quotas, who = gateways.add(), tenant(tokens_per_minute=1000)
    await quotas._heartbeat()
    (await enter(quotas, who, 100)).close()
    await asyncio.gather(*quotas._posted)
    async with RedisClient(server.url).redis as redis:
        await redis.config_set("maxmemory", 1)
        end(await enter(quotas, who, 800), TokenUsage(800, 0))
        for _ in range(3):
            gateways.time.ms += 6000  # idle for longer than from beat to beat
            with pytest.raises(StoreUnavailable):
                await quotas._heartbeat()
            assert not quotas.is_reachable
        assert (await refusal(quotas, who, 800)).reason == "tokens_per_minute"
        await redis.config_set("maxmemory", 0)
    await quotas._heartbeat()
    assert quotas.is_reachable
    assert (await refusal(quotas, who, 800)).reason == "tokens_per_minute"


@pytest.mark.parametrize("num_turns", range(5))
async def test_the_steward_ends_just_when_redis_is_found_lost(gateways: Gateways, num_turns: int) -> None:
    quotas = gateways.add()
    await quotas.start()
    async with asyncio.timeout(60):
        while await quotas._registry.beat(GatewayId("g0")) != 1:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    quotas._lose(StoreUnavailable("planted"))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await asyncio.wait_for(quotas.stop(), 20)


async def test_losing_redis_triggers_an_early_reconnect(
    gateways: Gateways, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for the next heartbeat would admit requests that the shared buckets do not count."""
    monkeypatch.setattr(quotas_module, "RETRY_S", 0.01)
    quotas = gateways.add()
    monkeypatch.setattr(quotas._store, "ttl_s", 100_000.0)
    await quotas.start()
    who = tenant(max_concurrency=10)
    await until(lambda: bool(quotas._lost._waiters))  # type: ignore[attr-defined]  # it rests between two beats
    for _ in range(2):
        server.stop()
        alone = await enter(quotas, who)
        assert not quotas.is_reachable and not alone.is_shared
        server.start()
        await until(lambda entry=alone: entry.is_shared)  # type: ignore[misc]
        await asyncio.gather(*quotas._posted)
    assert await gateways.num_open(who) == 2


async def test_a_debt_that_the_refill_has_paid_is_not_charged(gateways: Gateways, server: RedisServer) -> None:
    quotas = gateways.add()
    await quotas._heartbeat()
    who = tenant(requests_per_minute=2, tokens_per_minute=600)
    (await enter(quotas, who, 1)).close()
    server.stop()
    for _ in range(10):
        gateways.time.ms += 60_000
        end(await enter(quotas, who, 600), TokenUsage(600, 0))
    gateways.time.ms += 30_000
    server.start()
    await quotas._heartbeat()
    # Ten minutes' worth was used alone; all of it but half a minute has come back.
    entry = await enter(quotas, who, 0)
    assert (num_left(entry, "requests"), num_left(entry, "tokens")) == (1, 300)


async def test_a_settlement_that_redis_did_not_take_is_made_later(gateways: Gateways, server: RedisServer) -> None:
    one, two = await gateways.pair()
    who = tenant(tokens_per_minute=1000)
    entry = await enter(one, who, 100)
    await enter(two, who, 1)
    hurry(one)
    server.pause()
    end(entry, TokenUsage(10, 0))
    await asyncio.wait(one._posted)
    assert not one.is_reachable
    hurry(one, 30.0)
    server.resume()
    await one._heartbeat()
    await asyncio.gather(*one._posted)
    assert await gateways.num_open(who) == 1
    assert num_left(await enter(two, who, 0), "tokens") == 1000 - 10 - 1


async def test_a_redis_that_hangs_holds_up_nobody_for_long(
    gateways: Gateways, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas_module, "RETRY_S", 0.02)
    quotas = gateways.add()
    await quotas.start()
    who = tenant(requests_per_minute=100)
    await until(lambda: quotas._registry is not None and quotas.is_reachable)
    server.pause()
    hurry(quotas)
    first = await enter(quotas, who)
    assert not quotas.is_reachable and not first.is_shared
    hurry(quotas, 30.0)
    server.resume()
    await until(lambda: quotas.is_reachable)
    assert first.is_shared
    first.close()
    await until(lambda: not quotas._posted)


async def test_the_roll_counts_who_is_up(gateways: Gateways) -> None:
    one, two = await gateways.pair()
    assert (one._num_gateways, two._num_gateways) == (2, 2)
    await two.stop()
    gateways.made.remove(two)
    await one._heartbeat()
    assert one._num_gateways == 1


async def test_a_tenant_that_is_idle_is_forgotten(gateways: Gateways) -> None:
    quotas = gateways.add()
    (await enter(quotas, tenant(requests_per_minute=5))).close()
    await asyncio.gather(*quotas._posted)
    await quotas._heartbeat()
    assert len(quotas._states) == 1
    gateways.time.ms += 601_000
    await quotas._heartbeat()
    assert quotas._states == {}


async def test_the_buckets_of_an_inactive_tenant_expire(gateways: Gateways) -> None:
    quotas = gateways.add()
    (await enter(quotas, tenant(requests_per_minute=5))).close()
    await asyncio.gather(*quotas._posted)
    async with RedisClient(gateways.url).redis as redis:
        for key in await gateways.keys():
            assert 0 < await redis.pttl(key) <= 60_000


async def test_on_the_clock_of_the_server_limits_hold_too(redis_url: str) -> None:
    """The server's own clock is used, as in production."""
    store = RedisQuotas(redis_url, f"n{next(_names)}")
    who = tenant(requests_per_minute=1, tokens_per_minute=1)
    verdicts = [await store.reserve(who.id, who.limits, Reservation(name, 1, 1)) for name in ("a", "a", "b")]
    assert [verdict.refused for verdict in verdicts] == ["", "", "requests_per_minute"]
    assert 0 < verdicts[2].wait_ms <= 60_000
    await store.close()
