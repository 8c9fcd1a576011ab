"""Count the gateways that are running, in Redis."""

from __future__ import annotations

from tandem.core.ids import GatewayId
from tandem.stores.lua_script import ScriptPipeline
from tandem.stores.redis_client import RedisClient, RedisHealth


class GatewayRegistry:
    """Register running gateways in Redis and count them; an entry expires `ttl_s` seconds after its last heartbeat.

    `url`: as for `RedisClient`. `namespace`: prefix of the keys. `health`: receives the result of each command. All
    methods but `close` raise StoreUnavailable.
    """

    def __init__(self, url: str, namespace: str, *, ttl_s: float, health: RedisHealth | None = None) -> None:
        self._ttl_ms = round(ttl_s * 1000)
        self._keys = [f"{{{namespace}:gateways}}:roll"]
        self._calls = ScriptPipeline(RedisClient(url, store="roll", health=health), "roll")

    async def beat(self, gateway: GatewayId) -> int:
        """Register `gateway` or renew its entry, and return how many gateways are registered, `gateway` included."""
        return int(await self._calls.call(self._keys, [gateway, self._ttl_ms]))

    async def withdraw(self, gateway: GatewayId) -> int:
        """Remove the entry of `gateway`, and return how many gateways are still registered."""
        return int(await self._calls.call(self._keys, [gateway, 0]))

    async def close(self) -> None:
        """Wait for the calls in progress, then close the connections."""
        await self._calls.close()
