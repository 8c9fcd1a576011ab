"""Exchange through Redis how much each gateway has served to each tenant, so that all gateways queue fairly.

Counters are totals since a gateway process started, so a failed exchange loses nothing: the next one has the same
counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from tandem.admission.request_queue import ModelFlow
from tandem.admission.tenant_queue import FlowKey
from tandem.core.ids import GatewayId, TenantId
from tandem.core.lane import Lane
from tandem.stores.lua_script import Script
from tandem.stores.redis_client import RedisClient, RedisHealth

TTL_S = 10.0
"""A gateway's totals are deleted when it made no exchange for this many seconds."""


class ServiceCounters:
    """Exchange through Redis how many tokens each gateway has served, by model, lane and tenant.

    Remembers the other gateways' totals, so that each exchange returns only what was added. `url`: as for
    `RedisClient`. `namespace`: prefix of the keys. `gateway`: this gateway's id. `health`: receives the result of each
    command.
    """

    def __init__(self, url: str, namespace: str, gateway: GatewayId, *, health: RedisHealth | None = None) -> None:
        self._redis = RedisClient(url, store="service", health=health)
        self.close = self._redis.aclose
        self._gateway = gateway
        # Redis Cluster hashes only the part in braces, so all keys share one slot.
        self._keys = [f"{{{namespace}:service}}:{name}" for name in ("totals", "lapse")]
        self._script = Script(self._redis, "exchange")
        self._others: dict[str, dict[ModelFlow, int]] = {}
        self._is_first = True

    async def exchange(self, served: Iterable[tuple[ModelFlow, int]]) -> list[tuple[ModelFlow, int]]:
        """Publish how many tokens this gateway has served, and return how many tokens other gateways have served since
        the last exchange.

        `served`: pairs of a `ModelFlow` (model, lane and tenant) and the tokens that this gateway has served for it
        since it started. The result has such pairs for each other gateway, so a `ModelFlow` may occur several times.
        The first exchange returns nothing, because what other gateways served before this gateway started does not
        count in its queue. Raises StoreUnavailable; the next exchange then includes what this one would have returned.
        """
        arguments: list[str | int] = [self._gateway, _encode(served), round(TTL_S * 1000)]
        flat = await self._script(self._keys, arguments)
        fresh: list[tuple[ModelFlow, int]] = []
        for gateway, text in zip(flat[::2], flat[1::2], strict=True):
            if gateway.decode() != self._gateway:
                fresh += self._changes(gateway.decode(), dict(_decode(text)))
        if self._is_first:
            self._is_first, fresh = False, []
        return fresh

    def _changes(self, gateway: str, totals: dict[ModelFlow, int]) -> Iterator[tuple[ModelFlow, int]]:
        known = self._others.setdefault(gateway, {})
        for service, total in totals.items():
            change = total - known.get(service, 0)
            known[service] = total
            if change:
                yield service, change


def _encode(served: Iterable[tuple[ModelFlow, int]]) -> str:
    return json.dumps([[s.model, s.flow_key.lane, s.flow_key.tenant, total] for s, total in served])


def _decode(text: bytes) -> Iterator[tuple[ModelFlow, int]]:
    """Yield a gateway's totals; stops at the first row that this version cannot read."""
    try:
        rows = json.loads(text)
        for model, lane, tenant, total in rows:
            yield ModelFlow(str(model), FlowKey(Lane(lane), TenantId(str(tenant)))), int(total)
    except (ValueError, TypeError):
        return
