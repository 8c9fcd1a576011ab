"""The events of one request between who runs it and who reads it; never looks into an event."""

from __future__ import annotations

import asyncio

from tandem.core.errors import TandemError
from tandem.core.events import Finished, PromptScored, Token

StreamEvent = Token | PromptScored | Finished


class EventQueue:
    """Bounded by what the request may yield, its `max_tokens`. One reader."""

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: asyncio.Queue[StreamEvent | TandemError] = asyncio.Queue()

    def push(self, event: StreamEvent | TandemError) -> None:
        self._events.put_nowait(event)

    async def next(self) -> StreamEvent | TandemError:
        return await self._events.get()
