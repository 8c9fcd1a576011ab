"""Keep the gateway's endless background loops running when one iteration raises.

Nothing awaits these tasks, so that a task that ends with an exception would end unnoticed: without its ticker a gateway
would go on serving and enforce no deadline. Errors that an iteration must expect, such as an unreachable Redis, are
handled by the loop itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PAUSE_S = 1.0
"""Seconds to wait after an iteration that failed: the next one is likely to fail too, and each logs a traceback."""
log = logging.getLogger(__name__)


@asynccontextmanager
async def log_and_continue(work: str) -> AsyncIterator[None]:
    """Run one iteration of the loop `work` names: log an exception with its traceback, and then wait for `PAUSE_S`.
    A cancellation passes through and so ends the loop."""
    try:
        yield
    except Exception:
        log.exception("%s failed, next attempt in %g s", work, PAUSE_S)
        await asyncio.sleep(PAUSE_S)
