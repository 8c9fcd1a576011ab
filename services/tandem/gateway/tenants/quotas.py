"""Tenants' quotas at one gateway: shared books in Redis while it answers, a share of its own while it does not; never
keeps a request waiting for longer than Redis has to answer, and never fails one because Redis is gone.

While Redis is away this gateway keeps a book per tenant with its part of the limits: they are divided by the number of
gateways that were last known to be up. When Redis is back, what is still open is entered there, and what was used and
has not filled up again in the meantime is taken from the shared buckets.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from tandem.admission.quota import QuotaLimits, Reservation, ReservationResult
from tandem.admission.quota_errors import batch_exceeds_limit_error, exceeds_limit_error, rate_limited_error
from tandem.admission.tenant import Tenant
from tandem.admission.token_bucket import capacity
from tandem.admission.usage_estimator import TokenUsage
from tandem.core.clock import Clock
from tandem.core.ids import GatewayId, TenantId
from tandem.gateway.context.rate_limit_status import RateLimitedError
from tandem.gateway.context.supervise import log_and_continue
from tandem.gateway.tenants.quota_reservation import QuotaReservation, UnlimitedReservation, standing
from tandem.gateway.tenants.tenant_quota_state import TenantQuotaState
from tandem.stores.gateway_registry import GatewayRegistry
from tandem.stores.quota_store import RedisQuotas
from tandem.stores.script_pipeline import StoreUnavailable

BEATS_PER_TTL = 4
RETRY_S = 0.5
"""Between two looks for a Redis that is away."""
FORGET_S = 600.0
"""A tenant that asked for nothing for so long is unknown again, with the guess at its outputs."""
log = logging.getLogger(__name__)


class _PendingSettlement(NamedTuple):
    account: TenantQuotaState
    name: str
    used: int | None


class TenantQuotas:
    """The Quotas of a gateway. All of it runs on one event loop."""

    def __init__(self, gateway: GatewayId, store: RedisQuotas, roll: GatewayRegistry, clock: Clock) -> None:
        self._gateway = gateway
        self._store = store
        self._roll = roll
        self._clock = clock
        self._accounts: dict[TenantId, TenantQuotaState] = {}
        self._numbers = itertools.count(1)
        self._num_gateways = 1
        self._unsettled: list[_PendingSettlement] = []
        self._posted: set[asyncio.Future[Any]] = set()
        self._steward: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self.is_reachable = True

    async def start(self) -> None:
        self._steward = asyncio.create_task(self._keep(), name="quota-steward")

    async def stop(self) -> None:
        """Settlements that were made are waited for, and those that Redis did not answer tried once more; what is still
        open lapses."""
        if self._steward is not None:
            self._steward.cancel()
            await asyncio.gather(self._steward, return_exceptions=True)
        if self._posted:
            await asyncio.wait(self._posted)
        if self._unsettled:
            with suppress(StoreUnavailable):
                await self._beat()
            if self._posted:
                await asyncio.wait(self._posted)
        if self.is_reachable:
            await asyncio.gather(self._roll.withdraw(self._gateway), return_exceptions=True)
        await asyncio.gather(self._store.close(), self._roll.close())

    @property
    def entries(self) -> list[QuotaReservation]:
        """Those that are open."""
        return [entry for account in self._accounts.values() for entry in account.entries.values()]

    def left(self) -> Mapping[tuple[str, ...], float]:
        """By tenant and limit, the part of it that was left when the shared books told last."""
        found: dict[tuple[str, ...], float] = {}
        for account in list(self._accounts.values()):
            limits, levels = account.limits, account.levels
            for name, level, limit in (
                ("requests", levels.requests, limits.requests_per_minute),
                ("tokens", levels.tokens, limits.tokens_per_minute),
            ):
                if level is not None and limit:
                    found[account.tenant, name] = max(0, level) / capacity(limit)
        return found

    def check_feasible(self, tenant: Tenant, sizes: Sequence[tuple[int, int]]) -> None:
        limits = tenant.limits
        if len(sizes) > 1 and any(limits):
            guess = self._account(tenant.id, limits).guess
            charges = [guess.estimate(prompt, output, limits.tokens_per_minute) for prompt, output in sizes]
            error = batch_exceeds_limit_error(limits, charges)
            if error is not None:
                raise error

    async def enter(
        self, tenant: Tenant, num_prompt_tokens: int, max_output_tokens: int
    ) -> QuotaReservation | UnlimitedReservation:
        limits = tenant.limits
        if not any(limits):
            return UnlimitedReservation()
        if 0 < limits.tokens_per_minute < num_prompt_tokens:
            raise exceeds_limit_error(limits, num_prompt_tokens)
        account = self._account(tenant.id, limits)
        tokens = account.guess.estimate(num_prompt_tokens, max_output_tokens, limits.tokens_per_minute)
        ask = Reservation(self._name(), 1, tokens)
        verdict = await self._ask_redis(account, ask)
        is_shared = verdict is not None
        if verdict is None:
            limits = account.enter_local_mode(self._num_gateways)
            ask = Reservation(self._name(), 1, min(ask.tokens, limits.tokens_per_minute or ask.tokens))
            verdict = account.reserve_alone(ask, self._now_ms())
        if verdict.refused:
            raise RateLimitedError(rate_limited_error(verdict, limits), standing(verdict.levels, limits))
        entry = QuotaReservation(
            ask, standing(verdict.levels, limits), partial(self._closed, account), is_shared=is_shared
        )
        account.entries[ask.id] = entry
        return entry

    # ---- inside

    def _account(self, tenant: TenantId, limits: QuotaLimits) -> TenantQuotaState:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = TenantQuotaState(tenant, limits)
        account.limits = limits
        account.used_at_ms = self._now_ms()
        return account

    async def _ask_redis(self, account: TenantQuotaState, ask: Reservation) -> ReservationResult | None:
        """None: it does not answer."""
        if not self.is_reachable:
            return None
        try:
            verdict = await self._store.reserve(account.tenant, account.limits, ask)
        except StoreUnavailable as error:
            # A server that stood still may yet carry it out.
            self._unsettled.append(_PendingSettlement(account, ask.id, None))
            self._lose(error)
            return None
        except asyncio.CancelledError:
            # The client is gone. The call may be carried out all the same; this one comes after it.
            self._settle(_PendingSettlement(account, ask.id, None))
            raise
        account.levels, account.told_at_ms = verdict.levels, self._now_ms()
        return verdict

    def _closed(self, account: TenantQuotaState, entry: QuotaReservation, spent: TokenUsage | None) -> None:
        del account.entries[entry.ask.id]
        used = entry.used(spent)
        if spent is not None:
            account.guess.learn(spent.output)
        account.settle_alone(entry, used, self._now_ms())
        if not entry.is_shared:
            return
        if self.is_reachable:
            self._settle(_PendingSettlement(account, entry.ask.id, used))
        else:
            self._unsettled.append(_PendingSettlement(account, entry.ask.id, used))

    def _settle(self, settlement: _PendingSettlement) -> None:
        def look(answer: asyncio.Future[Any]) -> None:
            error = None if answer.cancelled() else answer.exception()
            if error is not None:
                self._unsettled.append(settlement)
                self._lose(error)

        account, name, used = settlement
        self._post(self._store.settle(account.tenant, account.limits, name, used)).add_done_callback(look)

    def _post(self, call: Awaitable[Any]) -> asyncio.Future[Any]:
        future = asyncio.ensure_future(call)
        self._posted.add(future)
        future.add_done_callback(self._posted.discard)
        return future

    def _lose(self, error: BaseException) -> None:
        if self.is_reachable:
            log.info("quotas are kept without Redis, as one of %d gateways: %s", self._num_gateways, error)
        self.is_reachable = False
        self._lost.set()

    def _name(self) -> str:
        return f"{self._gateway}/{next(self._numbers)}"

    def _now_ms(self) -> int:
        return int(self._clock.now() * 1000)

    # ---- the steward

    async def _keep(self) -> None:
        while True:
            async with log_and_continue("the heartbeat of quotas"):
                try:
                    await self._beat()
                except StoreUnavailable as error:
                    self._lose(error)
                await self._rest()

    async def _rest(self) -> None:
        """Until the next beat is due, which it is soon after Redis was lost, whoever found that out."""
        self._lost.clear()
        if self.is_reachable:
            with suppress(TimeoutError):
                # Not `wait_for`, which before Python 3.12 forgets a cancel that comes with the result.
                async with asyncio.timeout(self._store.ttl_s / BEATS_PER_TTL):
                    await self._lost.wait()
        if not self.is_reachable:
            await asyncio.sleep(RETRY_S)

    async def _beat(self) -> None:
        """Say that this gateway is up and what it has open, and come back to Redis if it was away."""
        self._num_gateways = max(1, await self._roll.beat(self._gateway))
        await _all(self._renew(account) for account in list(self._accounts.values()))
        if not self.is_reachable:
            # Nothing is waited for until all of this has been called: what is asked from now on comes after it.
            self.is_reachable = True
            calls = [call for account in self._accounts.values() for call in self._enter_alone(account)]
            unsettled, self._unsettled = self._unsettled, []
            for settlement in unsettled:
                self._settle(settlement)
            log.info("quotas are kept in Redis again, by %d gateways", self._num_gateways)
            await _all(calls)
        idle_since = self._now_ms() - FORGET_S * 1000
        for account in list(self._accounts.values()):
            if not account.entries and not account.is_alone and account.used_at_ms < idle_since:
                del self._accounts[account.tenant]

    async def _renew(self, account: TenantQuotaState) -> None:
        """Tell what was used so far. What Redis has lost, or has settled while this gateway stood still, is entered
        again; what it was settled with is not taken twice. Books that were kept alone are asked for in any case: that
        others answer says nothing of them."""
        shared = [entry for entry in account.entries.values() if entry.is_shared]
        beat_ms = self._store.ttl_s / BEATS_PER_TTL * 1000
        if not (shared or account.is_alone) and account.used_at_ms + beat_ms < self._now_ms():
            return
        told = {entry.ask.id: entry.so_far() for entry in shared}
        gone = await self._store.renew(account.tenant, account.limits, told)
        again = []
        for entry in [entry for entry in shared if entry.ask.id in account.entries]:
            if entry.ask.id not in gone:
                entry.told = told[entry.ask.id]
            else:
                account.begin_again(entry, self._name())
                again.append(self._store.reserve(account.tenant, account.limits, entry.ask))
        if again:
            log.warning("%d requests of tenant %s were not in the books any more", len(again), account.tenant)
        await _all(again)

    def _enter_alone(self, account: TenantQuotaState) -> Iterator[Awaitable[ReservationResult]]:
        """What was admitted alone goes into the shared books, whatever is left there."""
        if not account.is_alone:
            return
        requests, tokens = account.leave_local_mode(self._now_ms())
        for entry in account.entries.values():
            if not entry.is_shared:
                entry.is_shared = True
                yield self._reserve_used(account, entry.ask)
        if requests or tokens:
            ask = Reservation(self._name(), requests, tokens)
            yield self._reserve_used(account, ask)
            self._settle(_PendingSettlement(account, ask.id, tokens))

    def _reserve_used(self, account: TenantQuotaState, ask: Reservation) -> Awaitable[ReservationResult]:
        return self._post(self._store.reserve(account.tenant, account.limits, ask._replace(force=True)))


async def _all(calls: Iterable[Awaitable[Any]]) -> None:
    """Wait for all, then raise the first error."""
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
