"""Have the transfer thread test periodically whether it can move bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PROBE_S = 10.0
"""Seconds between two self-tests."""
ANSWER_S = 10.0
"""Seconds after which a self-test without an answer has failed."""


class TransferHealthCheck:
    """Own the result of the last self-test. `error` is None after success, else what is wrong. All calls on the event
    loop."""

    def __init__(self, start_self_test: Callable[[], None]) -> None:
        self._start_self_test = start_self_test
        self._answered = asyncio.Event()
        self.error: str | None = "the transport has not been tested yet"

    def answer(self, error: str | None) -> None:
        """Record the result of a self-test."""
        self.error = None if error is None else f"the transport's self-test failed: {error}"
        self._answered.set()

    async def once(self) -> str | None:
        """Run a self-test now; returns `error`."""
        self._answered.clear()
        try:
            self._start_self_test()
            async with asyncio.timeout(ANSWER_S):
                await self._answered.wait()
        except TimeoutError:
            self.error = f"the transfer thread has not answered for {ANSWER_S:g} s"
        except RuntimeError as error:
            self.error = str(error)
        return self.error

    async def run(self) -> None:
        """Run self-tests until cancelled."""
        while True:
            await asyncio.sleep(PROBE_S)
            await self.once()
