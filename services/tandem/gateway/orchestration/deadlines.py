"""What ends a request because time has passed: its client's deadline, or a wait for a place; never ends one itself."""

from __future__ import annotations

from functools import partial

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.flow.job_group import JobGroupPhase
from tandem.flow.overdue import queue_timeout_error
from tandem.flow.request_queue import PlacementQueue
from tandem.gateway.orchestration.active_request import ActiveRequest


def timeout_error(
    active: ActiveRequest, waiting: PlacementQueue, config: GatewayConfig, now: float
) -> TandemError | None:
    """A request that is sent back to the queue does not begin its wait anew."""
    is_queued, model = active.life.phase is JobGroupPhase.QUEUED, active.life.request.model
    if active.deadline is not None:
        error = _past_deadline(active.deadline - now, active.prefill_s if is_queued else 0.0)
        if error is not None:
            return error
    if not is_queued:
        return None
    return queue_timeout_error(
        config, active.told_at, waiting.hopeless_since(model), now, partial(waiting.why, model, now)
    )


def _past_deadline(left_s: float, prefill_s: float) -> TandemError | None:
    """What the client's own deadline ends: at once where its prompt alone takes longer than what is left."""
    if left_s <= 0:
        return TandemError(ErrorKind.DEADLINE, "the client's deadline has passed", reason="deadline")
    if left_s < prefill_s:
        reason = f"the client's deadline leaves {left_s:.3g} s, its prompt alone takes {prefill_s:.3g} s"
        return TandemError(ErrorKind.SLO_MISS, reason, retry_after_s=1.0, reason="deadline")
    return None
