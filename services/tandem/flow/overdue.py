"""Decide when a waiting request has timed out."""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError


def queue_timeout_error(
    config: GatewayConfig, since: float, hopeless_since: float | None, now: float, why: Callable[[], str]
) -> TandemError | None:
    """Return the error of a request that has waited too long, else None. Seconds of one clock.

    `since`: when it arrived or its client got its last token. `hopeless_since`: when the last suitable worker was gone;
    None: there is one.
    """
    if now - since >= config.queue_timeout_s:
        waited_s = config.queue_timeout_s
    elif hopeless_since is not None and now - max(since, hopeless_since) >= config.no_worker_wait_s:
        waited_s = config.no_worker_wait_s
    else:
        return None
    return TandemError(ErrorKind.NO_WORKER, f"no place within {waited_s:g} s: {why()}", retry_after_s=1.0)
