"""Lets requests in: each gets its quota, names for the blocks of its prompt and a place in the line, or an error; never
places one and never ends one that is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.admission.tenant_policy import apply_tenant_policy
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockHash, RequestId
from tandem.core.request import Request
from tandem.flow.phase_ledger import PhaseLedger
from tandem.flow.request_queue import PlacementQueue
from tandem.gateway.context.interfaces import KnownPrefixes, Quotas
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.orchestration.active_request import ActiveRequest
from tandem.gateway.orchestration.demand import DemandCounter


class AdmissionController:
    """`begin` makes an admitted request one that runs, with so many retries; `fail` ends one that waits, False where it
    does not run. `is_closed`: nobody comes in any more."""

    def __init__(
        self,
        waiting: PlacementQueue,
        config: GatewayConfig,
        quotas: Quotas,
        prefixes: KnownPrefixes,
        begin: Callable[[Request, PhaseLedger, int], ActiveRequest],
        fail: Callable[[RequestId, TandemError], bool],
        demand: DemandCounter,
    ) -> None:
        self.is_closed = False
        self._waiting = waiting
        self._config = config
        self._quotas = quotas
        self._prefixes = prefixes
        self._begin = begin
        self._fail = fail
        self._demand = demand

    def check_feasible(self, requests: Sequence[Request], caller: RequestContext) -> None:
        """Raises TandemError where all of these could never be in at once."""
        self._quotas.check_feasible(caller.tenant, [_size(request) for request in requests])

    async def admit(self, request: Request, caller: RequestContext, ledger: PhaseLedger) -> ActiveRequest:
        """Raises TandemError, and then nothing is left of the request."""
        request = apply_tenant_policy(request, caller.tenant)
        self._refuse_when_closed()
        quota = await self._quotas.enter(caller.tenant, *_size(request))
        try:
            hashes = await self._prefixes.name(request)
            self._refuse_when_closed()  # it may be by now
            self._demand.on_admitted(request)  # from here on only a lack of room keeps it out
            active = self._enter(request, caller, hashes, ledger)
        except BaseException:
            quota.close()
            raise
        quota.watch(active.spent)
        active.quota = quota
        return active

    def _refuse_when_closed(self) -> None:
        if self.is_closed:
            raise TandemError(ErrorKind.DRAINING, "this gateway is shutting down", retry_after_s=1.0)

    def _enter(
        self, request: Request, caller: RequestContext, hashes: Sequence[BlockHash], ledger: PhaseLedger
    ) -> ActiveRequest:
        """A place in the line. Raises TandemError when there is none, or when it would come too late."""
        tenant = caller.tenant
        admitted = self._waiting.admit(
            request, weight=tenant.weight, timeout_s=caller.timeout_s, policy=tenant.disaggregation, hashes=hashes,
            session=caller.tenant_session,
        )  # fmt: skip
        if admitted.leaves is not None and admitted.error is not None:
            self._make_room(admitted.leaves, admitted.error)
        active = self._begin(request, ledger, self._config.max_retries)
        active.prefill_s = admitted.prefill_s
        if caller.timeout_s is not None:
            active.deadline = active.received_at + caller.timeout_s
        return active

    def _make_room(self, leaves: RequestId, error: TandemError) -> None:
        """More wait than may. Raises the error when it is the newcomer, which nobody knows yet, that leaves."""
        if not self._fail(leaves, error):
            self._waiting.leave(leaves)
            raise error


def _size(request: Request) -> tuple[int, int]:
    """Tokens of its prompt, and of its longest output."""
    return len(request.prompt_tokens), request.sampling.max_tokens * request.num_choices
