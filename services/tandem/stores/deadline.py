"""When a wait for somebody else is over, in time that this process was there to listen; never asks anything itself."""

from __future__ import annotations

import asyncio
from types import TracebackType

AWAY_S = 0.05
"""An event loop that looks later than this did not run."""


class Deadline:
    """A block that ends with TimeoutError after `seconds`, as in `asyncio.timeout`.

    Time in which this process itself stood still does not count: a look that comes late (it was stopped, or its host
    took the core away) gives back what was lost, at most `seconds` in all, in which what came meanwhile is read.
    `wire.patience` counts so too, for the many waits of a stream.
    """

    __slots__ = ("_loop", "_seconds", "_spare_s", "_timeout", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = self._spare_s = seconds
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._seconds, self._look)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _look(self) -> None:
        now = self._loop.time()
        away_s = now - self._timer.when()
        given_s = min(away_s, self._spare_s) if away_s > AWAY_S else 0.0
        if not given_s:
            self._timeout.reschedule(now)
            return
        self._spare_s -= given_s
        self._timer = self._loop.call_later(given_s, self._look)
