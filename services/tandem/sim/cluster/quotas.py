"""Keep tenants' quotas at a simulated gateway, as a real gateway without Redis keeps them.

Reservations do not expire, because no simulated gateway dies, and are settled when a request ends. The heartbeat that
charges a running request's use beyond its estimate is not simulated.
"""

from __future__ import annotations

from collections.abc import Mapping

from tandem.admission.tenant import Tenant, apply_tenant_policy
from tandem.admission.tenant_quota_state import QuotaReservation, TenantQuotaState
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import TenantId
from tandem.core.request import Request
from tandem.sim.kernel.event_queue import SimEventQueue


class SimQuotas:
    """Reserve and settle the quota of each tenant at one gateway.

    `tenants`: the known tenants; None: every tenant is accepted, without limits.
    """

    def __init__(self, agenda: SimEventQueue, tenants: Mapping[TenantId, Tenant] | None) -> None:
        self._agenda = agenda
        self._tenants = tenants
        self._states = {name: TenantQuotaState(name, tenant.limits) for name, tenant in (tenants or {}).items()}

    def enter(self, request: Request) -> tuple[Tenant, Request, QuotaReservation | None]:
        """Reserve the estimated use of a request.

        Returns the request's tenant, the request under the policy of this tenant, and the reservation, which is None
        where the tenant has no limits. Raises TandemError for a refused request, for which nothing is reserved; it is
        UNAUTHENTICATED when the tenant is not known.
        """
        tenant = self._tenant(request.tenant)
        request = apply_tenant_policy(request, tenant)
        if not any(tenant.limits):
            return tenant, request, None
        state = self._states[tenant.id]
        demand = state.demand(request.id, len(request.prompt_tokens), request.max_output_tokens)
        quota = state.enter_locally(
            demand, 1, self._now_ms(), lambda entry, spent: state.end(entry, spent, self._now_ms())
        )
        return tenant, request, quota

    def check(self) -> None:
        """Check that no reservation is open. Raises AssertionError naming the tenant that has one."""
        for name, state in self._states.items():
            state.check()
            assert not state.entries, f"{name} has {len(state.entries)} reservations without a request"

    def _tenant(self, name: TenantId) -> Tenant:
        if self._tenants is None:
            return Tenant(id=name, cache_sharing="public")
        if name not in self._tenants:
            raise TandemError(ErrorKind.UNAUTHENTICATED, f"{name or 'a request without a tenant'} has no key")
        return self._tenants[name]

    def _now_ms(self) -> int:
        return int(self._agenda.now * 1000)
