"""When a request that waits has waited too long; never ends one and never reads a clock."""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError


def queue_timeout_error(
    config: GatewayConfig, since: float, hopeless_since: float | None, now: float, why: Callable[[], str]
) -> TandemError | None:
    """The end of a request that has waited `since` it came or its client had the last token of it. `hopeless_since`:
    when the last worker was gone that could serve it; None: there is one. Seconds of one clock."""
    if now - since >= config.queue_timeout_s:
        waited_s = config.queue_timeout_s
    elif hopeless_since is not None and now - max(since, hopeless_since) >= config.no_worker_wait_s:
        waited_s = config.no_worker_wait_s
    else:
        return None
    return TandemError(ErrorKind.NO_WORKER, f"no place within {waited_s:g} s: {why()}", retry_after_s=1.0)
