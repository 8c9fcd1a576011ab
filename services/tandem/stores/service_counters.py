"""What each gateway has served to whom, told to the others through Redis; never counts anything itself.

Totals since a gateway began, so an exchange that is lost loses nothing: the next one says it too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from redis.exceptions import RedisError

from tandem.admission.queue_item import FlowKey
from tandem.admission.request_queue import ModelFlow
from tandem.core.ids import GatewayId, TenantId
from tandem.core.lane import Lane
from tandem.stores.lua_script import Script, read_script
from tandem.stores.redis_client import connect
from tandem.stores.redis_health import RedisHealth

TTL_S = 10.0
"""A gateway that says nothing for so long is forgotten."""


class CountersUnavailable(Exception):
    """Redis does not answer, or refuses. Trying again later is right."""


class ServiceCounters:
    """One gateway's end. `url` as `tandem.stores.redis_client.connect` takes it."""

    def __init__(self, url: str, namespace: str, gateway: GatewayId, *, health: RedisHealth | None = None) -> None:
        self._redis = connect(url, store="service", health=health)
        self._gateway = gateway
        # Braces: Redis Cluster hashes only what is between them.
        self._keys = [f"{{{namespace}:service}}:{name}" for name in ("totals", "lapse")]
        self._script = Script(self._redis, read_script("exchange"))
        self._others: dict[str, dict[ModelFlow, int]] = {}
        self._is_first = True

    async def exchange(self, served: Iterable[tuple[ModelFlow, int]]) -> list[tuple[ModelFlow, int]]:
        """Tell this gateway's totals; returns what others have served since the last exchange. What they had served
        before the first one is nobody's business here. Raises CountersUnavailable, and then nothing is lost."""
        arguments: list[str | int] = [self._gateway, _written(served), round(TTL_S * 1000)]
        try:
            flat = await self._script(self._keys, arguments)
        except (RedisError, OSError) as error:
            raise CountersUnavailable(f"{type(error).__name__}: {error}") from error
        fresh: list[tuple[ModelFlow, int]] = []
        for gateway, text in zip(flat[::2], flat[1::2], strict=True):
            if gateway.decode() != self._gateway:
                fresh += self._changes(gateway.decode(), dict(_read(text)))
        if self._is_first:
            self._is_first, fresh = False, []
        return fresh

    async def close(self) -> None:
        await self._redis.aclose()

    def _changes(self, gateway: str, totals: dict[ModelFlow, int]) -> Iterator[tuple[ModelFlow, int]]:
        known = self._others.setdefault(gateway, {})
        for service, total in totals.items():
            change = total - known.get(service, 0)
            known[service] = total
            if change:
                yield service, change


def _written(served: Iterable[tuple[ModelFlow, int]]) -> str:
    return json.dumps([[s.model, s.flow_key.lane, s.flow_key.tenant, total] for s, total in served])


def _read(text: bytes) -> Iterator[tuple[ModelFlow, int]]:
    """Another version may write what this one cannot read: that is left out."""
    try:
        rows = json.loads(text)
        for model, lane, tenant, total in rows:
            yield ModelFlow(str(model), FlowKey(Lane(lane), TenantId(str(tenant)))), int(total)
    except (ValueError, TypeError):
        return
