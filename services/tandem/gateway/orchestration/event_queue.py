"""The events of one request between who runs it and who reads it; never looks into an event."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from tandem.core.errors import TandemError
from tandem.core.events import Finished, PromptLogprobs, Token

StreamEvent = Token | PromptLogprobs | Finished


class EventQueue:
    """For one reader. Bounded by what a request may yield, its `max_tokens`.

    Every token passes here, and nobody waits to push, which is what `asyncio.Queue` would cost more for.
    """

    __slots__ = ("_events", "_reader")

    def __init__(self) -> None:
        self._events: deque[StreamEvent | TandemError] = deque()
        self._reader: asyncio.Future[None] | None = None

    def __iter__(self) -> Iterator[StreamEvent | TandemError]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    def push(self, event: StreamEvent | TandemError) -> None:
        self._events.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> StreamEvent | TandemError:
        while not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._events.popleft()
