"""Write server-sent events over one HTTP exchange, framed as OpenAI does."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.gateway.http.exchange import Exchange, error_body

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Makes nginx and compatible proxies pass events on without buffering.
    "x-accel-buffering": "no",
}
_FULL_BYTES = 16 << 10
"""Number of held bytes from which on events are written without waiting for more."""


class EventStream:
    """Write one response of type text/event-stream to `exchange`: call `open` or `heartbeat` first, then `send` and
    `heartbeat` any number of times, then `close`.

    An error after the first byte is written as one event and ends the stream without `[DONE]`."""

    __slots__ = ("_exchange", "_held", "_num_held_bytes")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._held: list[bytes] = []
        self._num_held_bytes = 0

    async def open(self, headers: Mapping[str, str]) -> None:
        """Send the head of the response, with status 200, the headers of an event stream, and `headers`."""
        self._exchange.late_error = lambda error: b"".join([*self._held, _frame(error_body(error))])
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in {**_HEADERS, **headers}.items()]
        await self._exchange.send({"type": "http.response.start", "status": 200, "headers": encoded})

    async def heartbeat(self, headers: Mapping[str, str]) -> None:
        """Send a comment, which clients skip, so that no proxy closes the connection as dead. Opens the stream with
        `headers` first where it is not open yet."""
        if not self._exchange.started:
            await self.open(headers)
        await self._write(b": heartbeat\n\n", more=True)

    async def send(self, *events: bytes, more_follow: bool = False) -> None:
        """Send events, each of them one line of JSON.

        `more_follow`: the caller will send further events without waiting. The given events are then held and written
        together with the next ones, or once 16 KiB are held, because a write is half of the cost of a token.
        """
        for event in events:
            frame = _frame(event)
            self._held.append(frame)
            self._num_held_bytes += len(frame)
        if self._held and (not more_follow or self._num_held_bytes >= _FULL_BYTES):
            await self._write(self._take_held(), more=True)

    async def close(self, *events: bytes) -> None:
        """Send all held events, `events` and `[DONE]`, which marks a complete stream, and end the response."""
        last = b"".join(map(_frame, (*events, b"[DONE]")))
        await self._write(self._take_held() + last, more=False)

    async def _write(self, body: bytes, *, more: bool) -> None:
        await self._exchange.send({"type": "http.response.body", "body": body, "more_body": more})

    def _take_held(self) -> bytes:
        held = b"".join(self._held)
        self._held.clear()
        self._num_held_bytes = 0
        return held


def _frame(event: bytes) -> bytes:
    return b"data: %b\n\n" % event
