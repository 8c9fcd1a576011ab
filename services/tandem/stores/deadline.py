"""Limit the time of a wait for a peer, without counting time in which this process itself did not run."""

from __future__ import annotations

import asyncio
from types import TracebackType

STALL_S = 0.05
"""A timer callback that runs later than this shows that the event loop was stalled."""


class Deadline:
    """Async context manager that raises TimeoutError after `seconds`, like `asyncio.timeout`, but excludes stalls.

    If the timer callback runs more than `STALL_S` late, this process did not run (it was stopped, or its host took the
    core away). The deadline then moves by the time that was lost, by at most `seconds` in all, so that a reply that
    arrived during the stall can still be read. `wire.idle_timeout` does the same for the many waits of a stream.
    """

    __slots__ = ("_extension_left_s", "_loop", "_seconds", "_timeout", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._extension_left_s = seconds
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._seconds, self._on_timer)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _on_timer(self) -> None:
        now = self._loop.time()
        stall_s = now - self._timer.when()
        extension_s = min(stall_s, self._extension_left_s) if stall_s > STALL_S else 0.0
        if not extension_s:
            self._timeout.reschedule(now)
            return
        self._extension_left_s -= extension_s
        self._timer = self._loop.call_later(extension_s, self._on_timer)
