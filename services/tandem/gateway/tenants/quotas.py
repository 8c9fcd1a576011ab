"""Enforce tenants' quotas at one gateway: in Redis while it answers, with a local part of the limits while it does not.

Requests wait no longer than Redis takes to answer, and none fails because Redis is down. While it is down, each gateway
counts per tenant against the limits divided by the last known number of gateways. When Redis is back, open reservations
are entered there, and usage that the buckets have not refilled in the meantime is taken from the shared buckets."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from tandem.admission.quota import QuotaLimits, Reservation, ReservationResult, capacity
from tandem.admission.tenant import Tenant
from tandem.admission.tenant_quota_state import QuotaReservation, TenantQuotaState, TokenUsage
from tandem.core.clock import Clock
from tandem.core.ids import GatewayId, TenantId
from tandem.gateway.context.supervise import BackgroundLoop
from tandem.stores.quota_store import GatewayRegistry, RedisQuotas
from tandem.stores.redis_client import StoreUnavailable

BEATS_PER_TTL = 4
RETRY_S = 0.5
"""Seconds between two attempts to reach Redis."""
FORGET_S = 600.0
"""The state of a tenant without requests for this many seconds is dropped, including the estimate of its output
lengths."""
log = logging.getLogger(__name__)


class _PendingSettlement(NamedTuple):
    state: TenantQuotaState
    name: str
    used: int | None


class TenantQuotas:
    """Reserve and settle the quotas of all tenants for one gateway, in Redis or, while that is unreachable, locally;
    all calls must be on one event loop.

    `is_reachable`: False from a failed call of Redis until the next heartbeat that succeeds. `registry`: counts the
    running gateways, among which the limits are divided while Redis is unreachable."""

    def __init__(self, gateway: GatewayId, store: RedisQuotas, registry: GatewayRegistry, clock: Clock) -> None:
        self._gateway = gateway
        self._store = store
        self._registry = registry
        self._clock = clock
        self._states: dict[TenantId, TenantQuotaState] = {}
        self._numbers = itertools.count(1)
        self._num_gateways = 1
        self._unsettled: list[_PendingSettlement] = []
        self._posted: set[asyncio.Future[Any]] = set()
        self._loop = BackgroundLoop("the quota heartbeat", self._beat)
        self.start = self._loop.start
        self._lost = asyncio.Event()
        self.is_reachable = True

    async def stop(self) -> None:
        """Stop the heartbeat, wait for the settlements that are being sent, and send the failed ones once more. Redis
        settles reservations that are still open when they expire."""
        await self._loop.stop()
        if self._posted:
            await asyncio.wait(self._posted)
        if self._unsettled:
            with suppress(StoreUnavailable):
                await self._heartbeat()
            if self._posted:
                await asyncio.wait(self._posted)
        if self.is_reachable:
            await asyncio.gather(self._registry.withdraw(self._gateway), return_exceptions=True)
        await asyncio.gather(self._store.close(), self._registry.close())

    @property
    def entries(self) -> list[QuotaReservation]:
        """Return the open reservations of all tenants."""
        return [entry for state in self._states.values() for entry in state.entries.values()]

    def left(self) -> Mapping[tuple[str, ...], float]:
        """Return, by tenant id and limit ("requests" or "tokens"), the fraction of the limit (0 to 1) that was left in
        the latest reply of Redis. May be called on any thread."""
        found: dict[tuple[str, ...], float] = {}
        for state in list(self._states.values()):
            levels, limits = state.levels, state.limits
            for name, level, limit in zip(levels._fields, levels, limits, strict=False):
                if level is not None and limit:
                    found[state.tenant, name] = max(0, level) / capacity(limit)
        return found

    def check_feasible(self, tenant: Tenant, sizes: Sequence[tuple[int, int]]) -> None:
        """Check several requests of one client call before `enter` is called for any of them.

        `sizes`: for each request, a pair of the tokens of its prompt and the tokens of its longest output. Raises
        TandemError(INVALID_REQUEST) where the tenant's limits could never admit all of them."""
        limits = tenant.limits
        if len(sizes) > 1 and any(limits):
            state = self._state(tenant.id, limits)
            limits.check_batch([state.estimate(prompt, output) for prompt, output in sizes])

    async def enter(self, tenant: Tenant, num_prompt_tokens: int, max_output_tokens: int) -> QuotaReservation | None:
        """Reserve the tokens that a request may use and return the reservation, which the caller must close, however
        the request ends; None where the tenant has no limits.

        `max_output_tokens` covers all choices. Raises TandemError(QUOTA), with the exceeded limit as its `reason`, or
        TandemError(INVALID_REQUEST) where the request is larger than the tenant's tokens of a whole minute."""
        if not any(tenant.limits):
            return None
        state = self._state(tenant.id, tenant.limits)
        on_close = partial(self._closed, state)
        demand = state.demand(self._name(), num_prompt_tokens, max_output_tokens)
        result = await self._reserve_in_redis(state, demand)
        if result is None:
            return state.enter_locally(demand._replace(id=self._name()), self._num_gateways, self._now_ms(), on_close)
        return state.enter(demand, result, tenant.limits, on_close, is_shared=True)

    # ---- reservations

    def _state(self, tenant: TenantId, limits: QuotaLimits) -> TenantQuotaState:
        state = self._states.get(tenant)
        if state is None:
            state = self._states[tenant] = TenantQuotaState(tenant, limits)
        state.limits = limits
        state.used_at_ms = self._now_ms()
        return state

    async def _reserve_in_redis(self, state: TenantQuotaState, reservation: Reservation) -> ReservationResult | None:
        """Reserve in Redis; None where Redis does not answer."""
        if not self.is_reachable:
            return None
        try:
            result = await self._store.reserve(state.tenant, state.limits, reservation)
        except StoreUnavailable as error:
            # A stalled Redis may still execute the reservation later.
            self._unsettled.append(_PendingSettlement(state, reservation.id, None))
            self._lose(error)
            return None
        except asyncio.CancelledError:
            # The client is gone, but Redis may still execute the reservation; the settlement is ordered after it.
            self._settle(_PendingSettlement(state, reservation.id, None))
            raise
        state.levels, state.levels_at_ms = result.levels, self._now_ms()
        return result

    def _closed(self, state: TenantQuotaState, entry: QuotaReservation, spent: TokenUsage | None) -> None:
        used = state.end(entry, spent, self._now_ms())
        if not entry.is_shared:
            return
        if self.is_reachable:
            self._settle(_PendingSettlement(state, entry.reservation.id, used))
        else:
            self._unsettled.append(_PendingSettlement(state, entry.reservation.id, used))

    def _settle(self, settlement: _PendingSettlement) -> None:
        def on_done(call: asyncio.Future[Any]) -> None:
            error = None if call.cancelled() else call.exception()
            if error is not None:
                self._unsettled.append(settlement)
                self._lose(error)

        state, name, used = settlement
        self._post(self._store.settle(state.tenant, state.limits, name, used)).add_done_callback(on_done)

    def _post(self, call: Awaitable[Any]) -> asyncio.Future[Any]:
        future = asyncio.ensure_future(call)
        self._posted.add(future)
        future.add_done_callback(self._posted.discard)
        return future

    def _lose(self, error: BaseException) -> None:
        if self.is_reachable:
            message = "Redis keeps no quotas now; this gateway grants 1/%d of each limit by itself: %s"
            log.info(message, self._num_gateways, error)
        self.is_reachable = False
        self._lost.set()

    def _name(self) -> str:
        return f"{self._gateway}/{next(self._numbers)}"

    def _now_ms(self) -> int:
        return int(self._clock.now() * 1000)

    # ---- heartbeat

    async def _beat(self) -> float:
        """Send a heartbeat, and wait until the next one is due or Redis becomes unreachable."""
        try:
            await self._heartbeat()
        except StoreUnavailable as error:
            self._lose(error)
        self._lost.clear()
        if self.is_reachable:
            with suppress(TimeoutError):
                # Not `wait_for`, which before Python 3.12 loses a cancellation that arrives with the result.
                async with asyncio.timeout(self._store.ttl_s / BEATS_PER_TTL):
                    await self._lost.wait()
        return 0.0 if self.is_reachable else RETRY_S

    async def _heartbeat(self) -> None:
        """Register this gateway and renew its reservations in Redis; leave local mode where Redis is back."""
        self._num_gateways = max(1, await self._registry.beat(self._gateway))
        await _all(self._renew(state) for state in list(self._states.values()))
        if not self.is_reachable:
            # No await before all of these calls are queued, so that new reservations are ordered after them.
            self.is_reachable = True
            calls = [call for state in self._states.values() for call in self._enter_local_reservations(state)]
            unsettled, self._unsettled = self._unsettled, []
            for settlement in unsettled:
                self._settle(settlement)
            log.info("Redis keeps the quotas again, for %d gateways", self._num_gateways)
            await _all(calls)
        idle_since = self._now_ms() - FORGET_S * 1000
        for state in list(self._states.values()):
            if not state.entries and not state.is_local and state.used_at_ms < idle_since:
                del self._states[state.tenant]

    async def _renew(self, state: TenantQuotaState) -> None:
        """Report the tokens used so far.

        A reservation that Redis lost, or settled because this gateway was stalled, is entered again for the tokens that
        were not settled. A tenant in local mode is renewed even without reservations: a reply for another tenant does
        not prove that Redis serves this tenant's keys."""
        shared = [entry for entry in state.entries.values() if entry.is_shared]
        beat_ms = self._store.ttl_s / BEATS_PER_TTL * 1000
        if not (shared or state.is_local) and state.used_at_ms + beat_ms < self._now_ms():
            return
        usage = {entry.reservation.id: entry.used_so_far() for entry in shared}
        gone = await self._store.renew(state.tenant, state.limits, usage)
        again = []
        for entry in [entry for entry in shared if entry.reservation.id in state.entries]:
            if entry.reservation.id not in gone:
                entry.num_reported = usage[entry.reservation.id]
            else:
                state.reenter(entry, self._name())
                again.append(self._store.reserve(state.tenant, state.limits, entry.reservation))
        if again:
            message = "Redis lost %d quota reservations of tenant %s, and this gateway entered them again"
            log.warning(message, len(again), state.tenant)
        await _all(again)

    def _enter_local_reservations(self, state: TenantQuotaState) -> Iterator[Awaitable[ReservationResult]]:
        """Enter the reservations that were made in local mode into Redis, whatever is left there."""
        if not state.is_local:
            return
        requests, tokens = state.leave_local_mode(self._now_ms())
        for entry in state.entries.values():
            if not entry.is_shared:
                entry.is_shared = True
                yield self._reserve_used(state, entry.reservation)
        if requests or tokens:
            reservation = Reservation(self._name(), requests, tokens)
            yield self._reserve_used(state, reservation)
            self._settle(_PendingSettlement(state, reservation.id, tokens))

    def _reserve_used(self, state: TenantQuotaState, reservation: Reservation) -> Awaitable[ReservationResult]:
        return self._post(self._store.reserve(state.tenant, state.limits, reservation._replace(force=True)))


async def _all(calls: Iterable[Awaitable[Any]]) -> None:
    """Wait for all calls, then raise the first error."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
