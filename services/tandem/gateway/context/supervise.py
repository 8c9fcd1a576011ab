"""Keeps the endless work of a gateway going when a round of it fails; never knows what the work is.

A task that ends with an exception ends without a word, as nobody waits for it: without its ticker a gateway would
serve on, and no deadline would hold. What a round may well meet, such as a Redis that is away, it handles itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PAUSE_S = 1.0
"""After a round that failed. The next one may well fail too, and each logs a traceback."""
log = logging.getLogger(__name__)


@asynccontextmanager
async def log_and_continue(work: str) -> AsyncIterator[None]:
    """Around one round of `work`: an exception is logged with its traceback, and the next round comes `PAUSE_S` later.
    A cancellation ends it."""
    try:
        yield
    except Exception:
        log.exception("%s failed and goes on in %g s", work, PAUSE_S)
        await asyncio.sleep(PAUSE_S)
