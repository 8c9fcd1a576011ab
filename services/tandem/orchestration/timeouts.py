"""When a request has waited too long: its client's deadline, the queue's timeout, and the wait for any worker at
all."""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError


def deadline_error(left_s: float, prefill_s: float) -> TandemError | None:
    """Return what ends a request whose client's deadline is `left_s` away, or None.

    `prefill_s`: the least time its prompt still takes. A request that cannot be answered in time ends at once.
    """
    if left_s <= 0:
        return TandemError(ErrorKind.DEADLINE, "the client's deadline has passed", reason="deadline")
    if left_s < prefill_s:
        reason = f"the client's deadline leaves {left_s:.3g} s, its prompt alone takes {prefill_s:.3g} s"
        return TandemError(ErrorKind.SLO_MISS, reason, retry_after_s=1.0, reason="deadline")
    return None


def queue_timeout_error(
    config: GatewayConfig, since: float, no_worker_since: float | None, now: float, why: Callable[[], str]
) -> TandemError | None:
    """Return what ends a request that waits for a place, or None.

    `since`: when it arrived or its client got its last token; `no_worker_since`: when the last worker that could serve
    it was lost, None while there is one. Both are seconds of one clock. `why` says what it waits for."""
    if now - since >= config.queue_timeout_s:
        waited_s = config.queue_timeout_s
    elif no_worker_since is not None and now - max(since, no_worker_since) >= config.no_worker_wait_s:
        waited_s = config.no_worker_wait_s
    else:
        return None
    return TandemError(ErrorKind.NO_WORKER, f"no place within {waited_s:g} s: {why()}", retry_after_s=1.0)
