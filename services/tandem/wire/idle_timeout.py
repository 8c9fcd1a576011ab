"""The limit on each wait of a stream, at the price of one timer for many waits; never says what a timeout means."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType

AWAY_S = 0.05
"""An event loop that looks later than this did not run."""


class IdleTimeout:
    """A block that ends with TimeoutError when a wait in it, from `wait` to the next `wait` or `rest`, takes `seconds`.

    Says what `asyncio.timeout` around each of these waits would say. But that arms a timer for every message, which
    costs more than the message: here one timer looks at when the wait began, and there is none while nothing waits.

    Time in which this process itself stood still does not count: a look that comes late (it was stopped, or its host
    took the core away) gives back what was lost, at most `seconds` to a wait, in which what came meanwhile is read.
    """

    __slots__ = ("_due", "_loop", "_seconds", "_spare_s", "_timeout", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = self._spare_s = seconds
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf

    async def __aenter__(self) -> IdleTimeout:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def wait(self) -> None:
        """A wait begins."""
        self._due = self._loop.time() + self._seconds
        self._spare_s = self._seconds
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._look)

    def rest(self) -> None:
        """Until the next wait there is no limit."""
        self._due = math.inf

    def _look(self) -> None:
        now = self._loop.time()
        assert self._timer is not None
        away_s = now - self._timer.when()
        self._timer = None
        if self._due <= now and away_s > AWAY_S:
            given_s = min(away_s, self._spare_s)
            self._spare_s -= given_s
            self._due = now + given_s
        if self._due <= now:
            self._timeout.reschedule(self._due)
        elif self._due < math.inf:
            self._timer = self._loop.call_at(self._due, self._look)
