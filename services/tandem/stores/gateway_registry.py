"""The gateways that are up, counted in Redis; never says which of them serves what."""

from __future__ import annotations

from tandem.core.ids import GatewayId
from tandem.stores.lua_script import read_script
from tandem.stores.redis_client import connect
from tandem.stores.redis_health import RedisHealth
from tandem.stores.script_pipeline import ScriptPipeline


class GatewayRegistry:
    """An entry lapses `ttl_s` seconds after its last beat. Methods raise StoreUnavailable."""

    def __init__(self, url: str, namespace: str, *, ttl_s: float, health: RedisHealth | None = None) -> None:
        self._ttl_ms = round(ttl_s * 1000)
        self._keys = [f"{{{namespace}:gateways}}:roll"]
        self._line = ScriptPipeline(connect(url, store="roll", health=health), read_script("roll"))

    async def beat(self, gateway: GatewayId) -> int:
        """Be on the roll; returns how many are, this one included."""
        return int(await self._line.call(self._keys, [gateway, self._ttl_ms]))

    async def withdraw(self, gateway: GatewayId) -> int:
        """Be off the roll; returns how many are left."""
        return int(await self._line.call(self._keys, [gateway, 0]))

    async def close(self) -> None:
        await self._line.close()
