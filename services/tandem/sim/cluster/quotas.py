"""Keep tenants' policies and quotas at a simulated gateway, as the real gateway keeps them in Redis.

Reservations do not expire, because no simulated gateway dies, and are settled when a request ends. The heartbeat that
charges a running request's use beyond its estimate is not simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.admission.quota import Reservation, TenantQuota
from tandem.admission.quota_errors import exceeds_limit_error, rate_limited_error
from tandem.admission.tenant import Tenant
from tandem.admission.tenant_policy import apply_tenant_policy
from tandem.admission.usage_estimator import OutputLengthEstimator, TokenUsage
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import RequestId, TenantId
from tandem.core.request import Request
from tandem.orchestration.request_queue import RequestTerms
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets
from tandem.workload.scheduled_request import ScheduledRequest

_FOR_EVER_MS = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Tenants and latency targets of a simulated cluster.

    `tenants`: the known tenants; None: every tenant is accepted, without limits. `targets`: latency targets of each
    lane."""

    tenants: Mapping[TenantId, Tenant] | None = None
    targets: LatencyTargets = NO_TARGETS


@dataclass(slots=True)
class _Account:
    tenant: Tenant
    book: TenantQuota = field(default_factory=TenantQuota)
    guess: OutputLengthEstimator = field(default_factory=OutputLengthEstimator)


class SimQuotas:
    """Reserve and settle the quota of each tenant at one gateway.

    `tenants`: the known tenants; None: every tenant is accepted, without limits.
    """

    def __init__(self, tenants: Mapping[TenantId, Tenant] | None) -> None:
        self._is_open = tenants is None
        self._accounts = {name: _Account(tenant) for name, tenant in (tenants or {}).items()}

    def _tenant(self, name: TenantId) -> Tenant:
        """Return the tenant with this name. Raises TandemError(UNAUTHENTICATED) when it has no key."""
        account = self._accounts.get(name)
        if account is not None:
            return account.tenant
        if self._is_open:
            return Tenant(id=name)
        raise TandemError(ErrorKind.UNAUTHENTICATED, f"{name or 'a request without a tenant'} has no key")

    def enter(self, scheduled: ScheduledRequest, now: float) -> tuple[Request, RequestTerms]:
        """Reserve the estimated use of a request.

        Returns the request under its tenant's policy, and its settings for queueing and placement. Raises TandemError
        for a refused request, for which nothing is reserved.
        """
        request, tenant = scheduled.request, self._tenant(scheduled.request.tenant)
        terms = RequestTerms(
            weight=tenant.weight,
            timeout_s=scheduled.timeout_s,
            policy=tenant.disaggregation,
            session=scheduled.session,
        )
        if self._is_open:
            return request, terms
        request, limits = apply_tenant_policy(request, tenant), tenant.limits
        if any(limits):
            account, num_prompt = self._accounts[tenant.id], len(request.prompt_tokens)
            if 0 < limits.tokens_per_minute < num_prompt:
                raise exceeds_limit_error(limits, num_prompt)
            most = request.sampling.max_tokens * request.num_choices
            tokens = account.guess.estimate(num_prompt, most, limits.tokens_per_minute)
            verdict = account.book.reserve(Reservation(request.id, 1, tokens), limits, _ms(now), _FOR_EVER_MS)
            if verdict.refused:
                raise rate_limited_error(verdict, limits)
        return request, terms

    def settle(self, request: RequestId, tenant: TenantId, spent: TokenUsage | None, now: float) -> None:
        """Settle the reservation of a request that has ended; do nothing when it has none.

        `spent`: the used tokens; None when no worker began the request."""
        account = self._accounts.get(tenant)
        if account is None or request not in account.book.open:
            return
        if spent is not None:
            account.guess.learn(spent.output)
        used = None if spent is None else spent.total
        account.book.settle(request, used, account.tenant.limits, _ms(now), _FOR_EVER_MS)

    def check(self) -> None:
        """Check that no reservation is open. Raises AssertionError naming the tenant that has one."""
        for name, account in self._accounts.items():
            account.book.check()
            assert not account.book.open, f"{name} has {len(account.book.open)} reservations without a request"


def _ms(now: float) -> int:
    return int(now * 1000)
