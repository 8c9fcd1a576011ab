"""Asks the transfer thread over and over whether it can move bytes; never moves any itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PROBE_S = 10.0
ANSWER_S = 10.0


class TransferHealthCheck:
    """`error` is None after a self-test that passed, else what is wrong. All calls on the event loop."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._answered = asyncio.Event()
        self.error: str | None = "the transport has not been tested yet"

    def answer(self, error: str | None) -> None:
        """A self-test has ended."""
        self.error = None if error is None else f"the transport's self-test failed: {error}"
        self._answered.set()

    async def once(self) -> str | None:
        """Test now. Returns `error`."""
        self._answered.clear()
        try:
            self._ask()
            async with asyncio.timeout(ANSWER_S):
                await self._answered.wait()
        except TimeoutError:
            self.error = f"the transfer thread has not answered for {ANSWER_S:g} s"
        except RuntimeError as error:
            self.error = str(error)
        return self.error

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(PROBE_S)
            await self.once()
