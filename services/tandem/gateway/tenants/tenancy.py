"""Assemble authentication and quotas of one gateway from its configuration, and run them as one."""

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
    """Own the authenticator and the quotas that `gateway.auth` selects.

    `shared_quotas` are the quotas where they are enforced; None without authentication, where nothing runs."""

    def __init__(self, gateway: GatewayId, config: Config, clock: Clock, health: RedisHealth) -> None:
        """Raise TandemError(INVALID_REQUEST) for a tenants file that cannot be read."""
        self.authenticator: Authenticator = AllowAll()
        self.quotas: Quotas = NoQuotas()
        self.shared_quotas: TenantQuotas | None = None
        self._running: tuple[TenantsWatch, TenantQuotas] | None = None
        if config.gateway.auth == "off":
            return
        path, policy = Path(config.gateway.tenants), config.gateway.disaggregation
        authenticator = ApiKeyAuthenticator(read_tenants(path, policy), wall_ns)
        self.authenticator = authenticator
        store = RedisQuotas(config.redis.url, config.redis.namespace, health=health)
        registry = GatewayRegistry(config.redis.url, config.redis.namespace, ttl_s=store.ttl_s, health=health)
        quotas = TenantQuotas(gateway, store, registry, clock)
        self.quotas = quotas
        self.shared_quotas = quotas
        self._running = TenantsWatch(path, policy, authenticator), quotas

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
