"""Who may use a gateway and how much, put together and run as one; decides nothing itself."""

from __future__ import annotations

from pathlib import Path

from tandem.core.clock import Clock, wall_ns
from tandem.core.config import Config
from tandem.core.ids import GatewayId
from tandem.gateway.context.interfaces import AllowAll, Authenticator, Quotas
from tandem.gateway.tenants.authenticator import ApiKeyAuthenticator
from tandem.gateway.tenants.quota_reservation import NoQuotas
from tandem.gateway.tenants.quotas import TenantQuotas
from tandem.gateway.tenants.tenants_watch import TenantsWatch, read_tenants
from tandem.stores.gateway_registry import GatewayRegistry
from tandem.stores.quota_store import RedisQuotas
from tandem.stores.redis_health import RedisHealth


class Tenancy:
    """`authenticator` and `quotas` are what `gateway.auth` asks for; without keys nobody is counted and nothing runs.
    `shared`: the quotas where somebody is."""

    def __init__(self, gateway: GatewayId, config: Config, clock: Clock, health: RedisHealth) -> None:
        """Raises TandemError(INVALID_REQUEST) for a tenants file that cannot be read."""
        self.authenticator: Authenticator = AllowAll()
        self.quotas: Quotas = NoQuotas()
        self.shared: TenantQuotas | None = None
        self._running: tuple[TenantsWatch, TenantQuotas] | None = None
        if config.gateway.auth == "off":
            return
        path, policy = Path(config.gateway.tenants), config.gateway.disaggregation
        self.authenticator = door = ApiKeyAuthenticator(read_tenants(path, policy), wall_ns)
        store = RedisQuotas(config.redis.url, config.redis.namespace, health=health)
        roll = GatewayRegistry(config.redis.url, config.redis.namespace, ttl_s=store.ttl_s, health=health)
        self.quotas = self.shared = quotas = TenantQuotas(gateway, store, roll, clock)
        self._running = TenantsWatch(path, policy, door), quotas

    async def start(self) -> None:
        if self._running is not None:
            watch, quotas = self._running
            watch.start()
            await quotas.start()

    async def stop(self) -> None:
        if self._running is not None:
            watch, quotas = self._running
            await watch.stop()
            await quotas.stop()
