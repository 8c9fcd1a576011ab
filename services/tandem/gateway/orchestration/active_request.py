"""Provide the stream of one open request, as a front end reads it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence

from tandem.admission.tenant_quota_state import QuotaReservation
from tandem.core.errors import TandemError
from tandem.core.events import Finished, PromptLogprobs, Token
from tandem.core.ids import RequestId
from tandem.gateway.context.rate_limits import rate_limit_headers
from tandem.orchestration.director import OpenRequest

StreamEvent = Token | PromptLogprobs | Finished


class EventQueue:
    """Pass the events of one request to its one reader, in order. The queue has no maximum length, because `max_tokens`
    and the number of choices limit the events of a request.

    `asyncio.Queue` is not used, because it costs more and every token passes through this queue."""

    __slots__ = ("_events", "_reader")

    def __init__(self) -> None:
        self._events: deque[StreamEvent | TandemError] = deque()
        self._reader: asyncio.Future[None] | None = None

    def __iter__(self) -> Iterator[StreamEvent | TandemError]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    def push(self, event: StreamEvent | TandemError) -> None:
        """Append an event and wake the reader."""
        self._events.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> StreamEvent | TandemError:
        """Remove and return the oldest event; waits until there is one."""
        while not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._events.popleft()


class ActiveRequest:
    """Stream the output of one open request to its front end, as a `TokenStream`.

    The driver pushes events (`push`), and the front end iterates over them. `on_close`: called with the request's id to
    cancel the request. `on_finish`: called with the request's id and the index of a choice to stop that choice.
    `quota`: the request's reservation, which the driver closes at the request's end; None for a request that counts
    against no quota."""

    def __init__(
        self,
        open_request: OpenRequest,
        on_close: Callable[[RequestId], None],
        on_finish: Callable[[RequestId, int], None],
    ) -> None:
        self.state = open_request.state
        self._open_request = open_request
        self.quota: QuotaReservation | None = None
        self._on_close = on_close
        self._on_finish = on_finish
        self._events = EventQueue()
        self.push = self._events.push
        self._unended = set(range(self.state.request.num_choices))

    @property
    def path(self) -> str:
        return self.state.path

    @property
    def num_attempts(self) -> int:
        return 1 + self.state.num_retries

    @property
    def workers(self) -> Sequence[str]:
        return self._open_request.workers

    @property
    def reasons(self) -> Mapping[str, object]:
        return self.state.placement.reasons if self.state.placement is not None else {}

    @property
    def has_more(self) -> bool:
        return any(map(self._is_due, self._events))

    @property
    def rate_limits(self) -> Mapping[str, str]:
        return {} if self.quota is None else rate_limit_headers(self.quota.levels, self.quota.limits)

    async def __aiter__(self) -> AsyncGenerator[StreamEvent, None]:
        while self._unended:
            event = await self._events.next()
            if isinstance(event, TandemError):
                self._unended.clear()
                raise event
            if not self._is_due(event):
                continue
            if isinstance(event, Finished):
                self._unended.discard(event.key.choice)
            yield event

    def _is_due(self, event: StreamEvent | TandemError) -> bool:
        """Return whether the reader gets an event: False for an event of a choice that has ended or that the client has
        stopped."""
        return not isinstance(event, Token | Finished) or event.key.choice in self._unended

    def finish(self, choice: int) -> None:
        self._unended.discard(choice)
        self._on_finish(self.state.request.id, choice)

    def close(self) -> None:
        self._on_close(self.state.request.id)
