"""Keep the tenants' quotas in Redis, shared by all gateways, and count these gateways.

The Lua script `quota` implements `admission.quota.TenantQuota`, which documents each operation. It uses the clock of
the Redis server alone: gateways' clocks differ, and the fastest of them would refill everybody's buckets too early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from tandem.admission.quota import Levels, QuotaLimits, Reservation, ReservationResult
from tandem.core.ids import GatewayId, TenantId
from tandem.stores.lua_script import Argument, ScriptPipeline
from tandem.stores.redis_client import RedisClient, RedisHealth

ANSWER_S = 0.5
"""Seconds that a request waits for its quota; after that its gateway decides without Redis."""
DEFAULT_TTL_S = 20.0
"""Seconds after which a reservation that was not renewed is settled. Must exceed the time for which workers continue
the jobs of a lost gateway (`worker.gateway_grace_s`)."""
MAX_RENEWALS = 256
"""Largest number of reservations renewed in one call of the script, which blocks the Redis server."""


class RedisQuotas:
    """Reserve, renew and settle the quotas of tenants in Redis, shared by all gateways.

    Calls are executed in the order in which they are made, and raise StoreUnavailable when awaited. `url`: as for
    `RedisClient`. `namespace`: prefix of the keys. `ttl_s`: seconds after which a reservation that was not renewed is
    settled. `answer_s`: seconds that a call may take. `now_ms`: clock for tests, the same for all clients; None: the
    server's. `health`: receives the result of each command. The argument `limits` of the methods holds the tenant's
    current limits.
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
        self._calls = ScriptPipeline(RedisClient(url, answer_s, store="quota", health=health), "quota")
        self.close = self._calls.close

    def reserve(
        self, tenant: TenantId, limits: QuotaLimits, reservation: Reservation
    ) -> Coroutine[Any, Any, ReservationResult]:
        """Enqueue a reservation of a tenant's quota, and return an awaitable of its result. The result's `refused`
        names the limit that is exceeded, and is empty if the reservation is granted.

        Calls of `reserve` and `settle` are executed in the order in which they are made, not awaited.
        """
        answer = self._call(
            tenant, "reserve", limits, reservation.id, reservation.requests, reservation.tokens, int(reservation.force)
        )
        return _reservation_result(answer, limits)

    async def renew(self, tenant: TenantId, limits: QuotaLimits, used: Mapping[str, int]) -> set[str]:
        """Extend the life of reservations, and return the ids of those that are not open any more.

        `used` has the ids of the tenant's reservations, each with the tokens that its request has used so far. An empty
        mapping only settles the tenant's expired reservations.
        """
        items = list(used.items())
        parts = [items[i : i + MAX_RENEWALS] for i in range(0, len(items), MAX_RENEWALS)] or [[]]
        calls = [self._call(tenant, "renew", limits, *(value for pair in part for value in pair)) for part in parts]
        return {name.decode() for answer in await asyncio.gather(*calls) for name in answer[2:]}

    def settle(self, tenant: TenantId, limits: QuotaLimits, name: str, used: int | None) -> Awaitable[Any]:
        """Enqueue the end of the reservation with the id `name`, and return an awaitable that is done when it was
        executed.

        `used`: the tokens that its request used in all; None refunds the reservation in full, as if it had not been
        made.
        """
        return self._call(tenant, "settle", limits, name, "" if used is None else used)

    def _call(self, tenant: TenantId, verb: str, limits: QuotaLimits, *arguments: Argument) -> asyncio.Future[Any]:
        now: Argument = "" if self._now_ms is None else self._now_ms()
        return self._calls.call(self._keys(tenant), [verb, *limits, round(self.ttl_s * 1000), now, *arguments])

    def _keys(self, tenant: TenantId) -> Sequence[str]:
        """Return the tenant's keys. Redis Cluster hashes only the part in braces, so one tenant's keys share a slot,
        and those of many tenants are spread over the nodes."""
        return [f"{self._namespace}:quota:{{{tenant}}}:{name}" for name in ("levels", "open", "expiry")]


async def _reservation_result(reply: Awaitable[Any], limits: QuotaLimits) -> ReservationResult:
    requests, tokens, refused, wait_ms = await reply
    levels = Levels(requests if limits.requests_per_minute else None, tokens if limits.tokens_per_minute else None)
    return ReservationResult(levels, refused.decode(), wait_ms)


class GatewayRegistry:
    """Register running gateways in Redis and count them; an entry expires `ttl_s` seconds after its last heartbeat.

    `url`: as for `RedisClient`. `namespace`: prefix of the keys. `health`: receives the result of each command. All
    methods but `close` raise StoreUnavailable.
    """

    def __init__(self, url: str, namespace: str, *, ttl_s: float, health: RedisHealth | None = None) -> None:
        self._ttl_ms = round(ttl_s * 1000)
        self._keys = [f"{{{namespace}:gateways}}:roll"]
        self._calls = ScriptPipeline(RedisClient(url, store="roll", health=health), "roll")
        self.close = self._calls.close

    async def beat(self, gateway: GatewayId) -> int:
        """Register `gateway` or renew its entry, and return how many gateways are registered, `gateway` included."""
        return int(await self._calls.call(self._keys, [gateway, self._ttl_ms]))

    async def withdraw(self, gateway: GatewayId) -> int:
        """Remove the entry of `gateway`, and return how many gateways are still registered."""
        return int(await self._calls.call(self._keys, [gateway, 0]))
