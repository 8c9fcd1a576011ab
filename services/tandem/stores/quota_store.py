"""Tenants' quotas in Redis, one set of books for all gateways; never decides anything but by its script.

`admission.quota.QuotaBook` says what each method means. Books are kept on the clock of the server alone: clocks of
gateways differ, and the fastest of them would fill everybody's buckets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from tandem.admission.quota import Levels, QuotaLimits, Reservation, ReservationResult
from tandem.core.ids import TenantId
from tandem.stores.lua_script import Argument, read_script
from tandem.stores.redis_client import connect
from tandem.stores.redis_health import RedisHealth
from tandem.stores.script_pipeline import ScriptPipeline

ANSWER_S = 0.5
"""A request waits no longer for its quota; then its gateway goes on alone."""
DEFAULT_TTL_S = 20.0
"""Longer than workers go on with the jobs of a gateway that is gone (`worker.gateway_grace_s`)."""
MAX_RENEWALS = 256
"""In one call of the script, which holds up everybody else's."""


class RedisQuotas:
    """Calls are carried out in the order in which they are made. All raise StoreUnavailable when awaited.

    `now_ms` replaces the server's clock, for tests, which cannot wait for it; every user of one server must then
    bring the same.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        answer_s: float = ANSWER_S,
        now_ms: Callable[[], int] | None = None,
        health: RedisHealth | None = None,
    ) -> None:
        self.ttl_s = ttl_s
        self._namespace = namespace
        self._now_ms = now_ms
        self._line = ScriptPipeline(connect(url, answer_s, store="quota", health=health), read_script("quota"))

    def reserve(
        self, tenant: TenantId, limits: QuotaLimits, ask: Reservation
    ) -> Coroutine[Any, Any, ReservationResult]:
        """Called at once, before anything that is called later; as is `settle`."""
        answer = self._call(tenant, "reserve", limits, ask.id, ask.requests, ask.tokens, int(ask.force))
        return _verdict(answer, limits)

    async def renew(self, tenant: TenantId, limits: QuotaLimits, used: Mapping[str, int]) -> set[str]:
        """Those that are not open. Without any to renew, this settles those whose time is over."""
        told = list(used.items())
        parts = [told[i : i + MAX_RENEWALS] for i in range(0, len(told), MAX_RENEWALS)] or [[]]
        calls = [self._call(tenant, "renew", limits, *(value for pair in part for value in pair)) for part in parts]
        return {name.decode() for answer in await asyncio.gather(*calls) for name in answer[2:]}

    def settle(self, tenant: TenantId, limits: QuotaLimits, name: str, used: int | None) -> Awaitable[Any]:
        return self._call(tenant, "settle", limits, name, "" if used is None else used)

    async def close(self) -> None:
        await self._line.close()

    def _call(self, tenant: TenantId, verb: str, limits: QuotaLimits, *arguments: Argument) -> asyncio.Future[Any]:
        now: Argument = "" if self._now_ms is None else self._now_ms()
        return self._line.call(self._keys(tenant), [verb, *limits, round(self.ttl_s * 1000), now, *arguments])

    def _keys(self, tenant: TenantId) -> Sequence[str]:
        """Braces: Redis Cluster hashes only what is between them, so that a tenant's books are on one server, and those
        of many tenants on many."""
        return [f"{self._namespace}:quota:{{{tenant}}}:{name}" for name in ("levels", "open", "expiry")]


async def _verdict(answering: Awaitable[Any], limits: QuotaLimits) -> ReservationResult:
    answer = await answering
    return ReservationResult(_levels(answer, limits), answer[2].decode(), answer[3])


def _levels(answer: Sequence[Any], limits: QuotaLimits) -> Levels:
    return Levels(
        answer[0] if limits.requests_per_minute else None,
        answer[1] if limits.tokens_per_minute else None,
    )
