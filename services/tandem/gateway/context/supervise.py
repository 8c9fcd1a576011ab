"""Keep the gateway's endless background loops running when one iteration raises.

Nothing awaits these tasks, so that a task that ends with an exception would end unnoticed: without its ticker a gateway
would go on serving and enforce no deadline. Errors that an iteration must expect, such as an unreachable Redis, are
handled by the loop itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

PAUSE_S = 1.0
"""Seconds to wait after an iteration that failed: the next one is likely to fail as well, and each logs a traceback."""
log = logging.getLogger(__name__)


class BackgroundLoop:
    """Call `step` again and again in one task, from `start` to `stop`.

    A step returns the seconds until the next step. If a step raises, the exception is logged with `work`, the name of
    what the loop does, and the next step follows after `PAUSE_S` seconds.
    """

    def __init__(self, work: str, step: Callable[[], Awaitable[float]]) -> None:
        self._work = work
        self._step = step
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self._work)

    async def stop(self) -> None:
        """Cancel the step in progress and wait until it has ended; does nothing before `start`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                pause_s = await self._step()
            except Exception:
                log.exception("%s failed and is tried again in %g s", self._work, PAUSE_S)
                pause_s = PAUSE_S
            await asyncio.sleep(pause_s)
