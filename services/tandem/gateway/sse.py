"""Writes server-sent events over one exchange, as OpenAI frames them; never knows what an event says."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.gateway.asgi import Exchange, Header, error_body

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Asks nginx and its kin not to collect events.
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """One event-stream response: `open`, any number of `send` and `heartbeat`, then `close`.

    An error after the first byte is one event, and no mark of completeness follows it.
    """

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def open(self, headers: Iterable[Header]) -> None:
        self._exchange.late_error = lambda error: _frame(error_body(error))
        await self._exchange.start(200, [*_HEADERS, *headers])

    async def heartbeat(self, headers: Iterable[Header]) -> None:
        """A comment, which clients skip, so that nothing on the way takes the connection for dead. Opens the stream
        with `headers` where it is not open yet."""
        if not self._exchange.started:
            await self.open(headers)
        await self._exchange.write(b": heartbeat\n\n", more=True)

    async def send(self, *events: bytes) -> None:
        """Each event is one line of JSON; all of them leave in one write."""
        await self._exchange.write(b"".join(map(_frame, events)), more=True)

    async def close(self, *events: bytes) -> None:
        """The last events and the mark of a complete stream."""
        await self._exchange.write(b"".join(map(_frame, (*events, b"[DONE]"))), more=False)


def _frame(event: bytes) -> bytes:
    return b"data: %b\n\n" % event
