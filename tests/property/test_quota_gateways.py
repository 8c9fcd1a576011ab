"""Two gateways on one store that loses calls and answers and goes away: whatever happens, nothing is left open and no
tenant pays twice; never a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tandem.admission.quota import UNIT, QuotaLimits, Reservation, ReservationResult, TenantQuota, capacity
from tandem.admission.tenant import Tenant
from tandem.admission.tenant_quota_state import QuotaReservation, TokenUsage
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import GatewayId, TenantId
from tandem.gateway.tenants.quotas import TenantQuotas
from tandem.stores.redis_client import StoreUnavailable
from tests.effort import effort

TTL_MS = 20_000
WHO = Tenant(id=TenantId("acme"), requests_per_minute=30, tokens_per_minute=1000, max_concurrency=8)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.integers(0, 1), st.integers(1, 400)),
        st.tuples(st.just("use"), st.integers(0, 9), st.integers(0, 300)),
        st.tuples(st.just("close"), st.integers(0, 9)),
        st.tuples(st.just("beat"), st.integers(0, 1)),
        st.tuples(st.just("wait"), st.sampled_from([100, 5_000, 15_000, TTL_MS + 1])),
        st.tuples(st.just("store"), st.sampled_from(["well", "well", "deaf", "dumb", "new"])),
    ),
    max_size=40,
)


class World:
    """The store, the time and the roll. `deaf`: calls are lost; `dumb`: they are carried out, and their answers lost;
    `new`: it has forgotten all."""

    def __init__(self) -> None:
        self.ms = 1_000_000
        self.state = "well"
        self.book = TenantQuota()
        self.ttl_s = TTL_MS / 1000
        self.ghosts: set[str] = set()
        """Reservations that were made, and whose answers were lost."""

    def now(self) -> float:
        return self.ms / 1000

    def set(self, state: str) -> None:
        if state == "new":
            self.book, state = TenantQuota(), "well"
        self.state = state

    def reserve(self, tenant: TenantId, limits: QuotaLimits, reservation: Reservation) -> Awaitable[ReservationResult]:
        if self.state == "dumb":
            self.ghosts.add(reservation.id)
        return self._answer(lambda: self.book.reserve(reservation, limits, self.ms, TTL_MS))

    def renew(self, tenant: TenantId, limits: QuotaLimits, used: Mapping[str, int]) -> Awaitable[set[str]]:
        return self._answer(lambda: set(self.book.renew(used, limits, self.ms, TTL_MS)))

    def settle(self, tenant: TenantId, limits: QuotaLimits, name: str, used: int | None) -> Awaitable[bool]:
        return self._answer(lambda: self.book.settle(name, used, limits, self.ms, TTL_MS))

    def beat(self, gateway: GatewayId) -> Awaitable[int]:
        return self._answer(lambda: 2)

    def _answer(self, call: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        found = None if self.state == "deaf" else call()
        self.book.check()
        if self.state == "well":
            answer.set_result(found)
        else:
            answer.set_exception(StoreUnavailable(self.state))
        return answer


class Used:
    """What one request has used."""

    def __init__(self, entry: QuotaReservation) -> None:
        self.entry = entry
        self.tokens = 0
        entry.watch(lambda: TokenUsage(0, self.tokens))


async def run(steps: list[tuple[Any, ...]]) -> None:
    world = World()
    gateways = [TenantQuotas(GatewayId(f"g{i}"), world, world, world) for i in range(2)]  # type: ignore[arg-type]
    running: list[Used] = []
    for step in steps:
        match step:
            case ("enter", which, prompt):
                try:
                    entry = await gateways[which].enter(WHO, prompt, 0)
                except TandemError as error:
                    assert error.kind is ErrorKind.QUOTA and error.retry_after_s
                else:
                    assert isinstance(entry, QuotaReservation)
                    running.append(Used(entry))
            case ("use", which, tokens) if running:
                running[which % len(running)].tokens += tokens
            case ("close", which) if running:
                running.pop(which % len(running)).entry.close()
            case ("beat", which):
                await beat(gateways[which])
            case ("wait", ms):
                world.ms += ms
            case ("store", state):
                world.set(state)
        await settled(gateways)
        assert sum(len(each.entries) for each in gateways) == len(running)
    await end(world, gateways, running)


async def end(world: World, gateways: list[TenantQuotas], running: list[Used]) -> None:
    """Everything is well again: what is open is open in the books, what ends leaves nothing, and after a minute without
    a request nobody owes anything but what was used beyond a minute's worth."""
    world.set("well")
    for _ in range(2):
        for each in gateways:
            await beat(each)
        await settled(gateways)
    assert all(each.is_reachable and not each._unsettled for each in gateways)
    names = {used.entry.reservation.id for used in running}
    assert names <= world.book.open.keys() <= names | world.ghosts
    assert all(used.entry.is_shared for used in running)
    for used in running:
        used.entry.close()
    await settled(gateways)
    assert not [entry for each in gateways for entry in each.entries]
    for _ in range(8):
        world.ms += TTL_MS
        world.book.renew({}, WHO.limits, world.ms, TTL_MS)
    # What no gateway knows of lapses.
    assert world.book.open == {}
    most = sum(used.tokens for used in running)
    tokens = world.book.levels.tokens
    assert tokens is not None and tokens >= capacity(WHO.tokens_per_minute) - max(0, most) * UNIT


async def beat(gateway: TenantQuotas) -> None:
    try:
        await gateway._heartbeat()
    except StoreUnavailable as error:
        gateway._lose(error)


async def settled(gateways: list[TenantQuotas]) -> None:
    for each in gateways:
        while each._posted:
            await asyncio.wait(each._posted)


@effort(120)
@given(STEPS)
def test_nothing_is_left_open_whatever_is_lost(steps: list[tuple[Any, ...]]) -> None:
    asyncio.run(run(steps))


@effort(80)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500), st.sampled_from([0, 100, 5_000])), max_size=25))
def test_a_store_that_answers_ends_with_what_was_used(usages: list[tuple[int, int, int]]) -> None:
    """Without faults the bucket is what a plain sum says."""

    async def scenario() -> None:
        world = World()
        gateway = TenantQuotas(GatewayId("g"), world, world, world)  # type: ignore[arg-type]
        level, then = capacity(WHO.tokens_per_minute), world.ms
        for prompt, used, wait in usages:
            try:
                entry = await gateway.enter(WHO, prompt, 0)
            except TandemError:
                world.ms += wait
                continue
            entry.watch(lambda used=used: TokenUsage(used, 0))  # type: ignore[misc]
            entry.close()
            await settled([gateway])
            brought = WHO.tokens_per_minute * (world.ms - then)
            level = min(
                capacity(WHO.tokens_per_minute), min(capacity(WHO.tokens_per_minute), level + brought) - used * UNIT
            )
            then = world.ms
            assert world.book.levels.tokens == level
            world.ms += wait

    asyncio.run(scenario())
