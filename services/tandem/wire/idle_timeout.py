"""Limit how long each wait of a stream may take, with one timer for many waits."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType

STALL_S = 0.05
"""A timer callback that runs later than this shows that the event loop was stalled."""


class IdleTimeout:
    """Raise TimeoutError in an `async with` block when one wait in the block takes longer than `seconds`.

    A wait lasts from a call of `wait` to the next call of `wait` or `rest`. This costs less than `asyncio.timeout`
    around each wait, because one timer serves many waits.

    Time in which this process did not run (it was stopped, or its host gave the core to others) does not count, up to
    `seconds` for each wait, because a message that arrived in that time can still be read. Such a time is noticed when
    the timer runs more than `STALL_S` late.
    """

    __slots__ = ("_due", "_extension_left_s", "_loop", "_seconds", "_timeout", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._extension_left_s = seconds
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
        """Begin a wait, which may take `seconds` from now, and end the previous one. Returns immediately; call it
        before awaiting the next message.
        """
        self._due = self._loop.time() + self._seconds
        self._extension_left_s = self._seconds
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._on_timer)

    def rest(self) -> None:
        """End the current wait without beginning another: until the next call of `wait` there is no limit."""
        self._due = math.inf

    def _on_timer(self) -> None:
        now = self._loop.time()
        assert self._timer is not None
        stall_s = now - self._timer.when()
        self._timer = None
        if self._due <= now and stall_s > STALL_S:
            extension_s = min(stall_s, self._extension_left_s)
            self._extension_left_s -= extension_s
            self._due = now + extension_s
        if self._due <= now:
            self._timeout.reschedule(self._due)
        elif self._due < math.inf:
            self._timer = self._loop.call_at(self._due, self._on_timer)
