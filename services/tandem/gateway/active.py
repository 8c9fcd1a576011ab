"""One request that the dispatch runs, as its front sees it; owns the queue of its tokens, decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from tandem.core.errors import TandemError
from tandem.core.events import Finished, PromptScored, Token
from tandem.core.ids import WorkerRef
from tandem.flow.lifecycle import RequestLife
from tandem.gateway.event_queue import EventQueue
from tandem.gateway.ports import Standing
from tandem.routing.placement import Placement


class ActiveRequest:
    """A TokenStream over a life. `came_at` is when it was admitted and `moved_at` when it last came forward, on the
    dispatch's clock.

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
        self.excluded_until: dict[WorkerRef, float] = {}
        self.waiting_for = "a place"
        self._on_close = on_close
        self._on_finish = on_finish
        self.standing = Standing()
        self._events = EventQueue()
        self._open = set(range(life.request.num_choices))

    @property
    def path(self) -> str:
        return self.life.placement.path if self.life.placement is not None else ""

    @property
    def has_more(self) -> bool:
        return any(map(self._is_wanted, self._events))

    def push(self, event: Token | PromptScored | Finished | TandemError) -> None:
        self._events.push(event)

    def exclude(self, workers: frozenset[WorkerRef], until: float) -> None:
        self.excluded_until.update(dict.fromkeys(workers, until))

    def excluded(self, now: float) -> frozenset[WorkerRef]:
        self.excluded_until = {w: until for w, until in self.excluded_until.items() if until > now}
        return frozenset(self.excluded_until)

    async def __aiter__(self) -> AsyncIterator[Token | PromptScored | Finished]:
        while self._open:
            event = await self._events.next()
            if isinstance(event, TandemError):
                self._open.clear()
                raise event
            if not self._is_wanted(event):
                continue
            if isinstance(event, Finished):
                self._open.discard(event.key.choice)
            yield event

    def _is_wanted(self, event: Token | PromptScored | Finished | TandemError) -> bool:
        """Not of a choice that has ended, or that the client has enough of."""
        return not isinstance(event, Token | Finished) or event.key.choice in self._open

    def finish(self, choice: int) -> None:
        self._open.discard(choice)
        self._on_finish(self, choice)

    async def aclose(self) -> None:
        self._on_close(self)

    def __repr__(self) -> str:
        return f"<active {self.life!r}>"
