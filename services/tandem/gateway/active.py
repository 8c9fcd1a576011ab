"""One request that the dispatch runs, as its front sees it; owns the queue of its tokens, decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from tandem.core.errors import TandemError
from tandem.core.events import Finished, PromptScored, Token
from tandem.flow.lifecycle import RequestLife
from tandem.gateway.ports import Standing
from tandem.routing.placement import Placement


class ActiveRequest:
    """A TokenStream over a life. `came_at` is when it was admitted and `moved_at` when it last came forward, on the
    dispatch's clock.

    `deadline` is the client's own, on the same clock; None: it has none. `prefill_s`: the least that its prompt takes.
    `pinned` names the workers of a probe, which is not routed. The queue is bounded by the request's choices and
    `max_tokens`.
    """

    def __init__(
        self,
        life: RequestLife,
        now: float,
        on_close: Callable[[ActiveRequest], None],
        on_finish: Callable[[ActiveRequest, int], None],
    ) -> None:
        self.life = life
        self.came_at = self.moved_at = now
        self.pinned: Placement | None = None
        self.deadline: float | None = None
        self.prefill_s = 0.0
        self._on_close = on_close
        self._on_finish = on_finish
        self.standing = Standing()
        self._events: asyncio.Queue[Token | PromptScored | Finished | TandemError] = asyncio.Queue()
        self._open = set(range(life.request.num_choices))

    @property
    def path(self) -> str:
        return self.life.placement.path if self.life.placement is not None else ""

    def push(self, event: Token | PromptScored | Finished | TandemError) -> None:
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Token | PromptScored | Finished]:
        while self._open:
            event = await self._events.get()
            if isinstance(event, TandemError):
                self._open.clear()
                raise event
            if not isinstance(event, PromptScored) and event.key.choice not in self._open:
                continue
            if isinstance(event, Finished):
                self._open.discard(event.key.choice)
            yield event

    def finish(self, choice: int) -> None:
        self._open.discard(choice)
        self._on_finish(self, choice)

    async def aclose(self) -> None:
        self._on_close(self)

    def __repr__(self) -> str:
        return f"<active {self.life!r}>"
