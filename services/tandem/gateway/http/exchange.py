"""Hold the request and the state of the response of one HTTP exchange, and write its responses, events and errors."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tandem.admission.quota import RateLimitedError
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.rate_limits import rate_limit_headers
from tandem.gateway.context.request_context import label_of
from tandem.gateway.http.openai_schema import ErrorBody, ErrorReply

_log = logging.getLogger(__name__)
_REFUSALS = (429, 503)
DEFAULT_RETRY_S = 1.0
"""Seconds in the header `retry-after` of a refusal (status 429 or 503) whose error names no time."""
NO_SNIFFING = b"x-content-type-options", b"nosniff"
_UNPRINTABLE = re.compile(rb"[^\x20-\x7e]")
_MAX_MESSAGE_CHARS, _MAX_PARAM_CHARS = 2_000, 200
_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Makes nginx and compatible proxies pass events on without buffering.
    "x-accel-buffering": "no",
}
_FULL_BYTES = 16 << 10
"""Number of held bytes from which on events are written without waiting for more."""


class Exchange(Request):
    """Hold one HTTP request: read its headers and body, and send its one response through `send`.

    `request_id`: the client's `x-request-id` where that is 1 to 128 visible ASCII characters, else a new one; every
    response carries it. It is only a label and identifies nothing, because clients repeat theirs. `started`: the head
    of the response was sent. `complete`: the whole body of the response was sent. `header_items`: lower-case names and
    values of the headers, in their order. `fields`: the headers by lower-case name, with the first value of a repeated
    name; a lookup is faster than in Starlette's `headers`, which searches a list."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self.header_items = self.headers.items()
        self.fields = dict(reversed(self.header_items))
        self.started = False
        self.complete = False
        self.status = 0
        """Status of the response; 0 before its head was sent."""
        self.is_counted = True
        """Whether metrics count the response; false for the console's own requests, which are not client traffic."""
        self.late_error: Callable[[TandemError], bytes] | None = None
        """Formats an error as the rest of a response whose head was sent; None where such a response cannot hold an
        error."""
        self.request_id = label_of(self.fields.get("x-request-id"))

    async def send(self, message: Message) -> None:
        """Send one ASGI message of the response. The message that begins the response also gets the headers
        `x-request-id` and `x-content-type-options: nosniff`, which keeps browsers from guessing another media type than
        the declared one."""
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message["headers"] += ((b"x-request-id", self.request_id.encode("ascii")), NO_SNIFFING)
        else:
            self.complete = not message.get("more_body", False)
        await self._send(message)

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send a part of the response's body, after its head. `more`: further parts follow."""
        self.complete = not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Send the head of a response with status 200 and these headers."""
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": 200, "headers": encoded})

    async def send_json(self, body: bytes, headers: Mapping[str, str]) -> None:
        """Send a whole response with status 200 and a body of JSON; costs less than `json_response`."""
        await self.begin({"content-type": "application/json", "content-length": str(len(body)), **headers})
        await self.write(body, more=False)

    async def read_body(
        self, max_bytes: int, large_bytes: int, begin_large: Callable[[int], Awaitable[float]]
    ) -> bytes:
        """Read and return the whole body. `begin_large` is awaited once for a body of more than `large_bytes`: before
        any of it is read where its size is declared, else before the rest is read. Its argument is the declared size in
        bytes, or `max_bytes` where none is declared, and its result the seconds within which the rest must arrive.

        Raises BODY_TOO_LARGE as soon as the declared size or the received bytes exceed `max_bytes`; UNSUPPORTED for a
        compressed body, because a small one could expand to any size; REQUEST_TIMEOUT for a large body that is late;
        ClientDisconnect where the client disconnects before the end. The HTTP server discards what the client still
        sends after an error, so that the connection can be used again."""
        encoding = self.fields.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            reason = f"content-encoding {encoding!r} is not supported; send the body uncompressed"
            raise TandemError(ErrorKind.UNSUPPORTED, reason, param="content-encoding")
        length = self.fields.get("content-length", "0")
        declared_bytes = int(length) if length.isdecimal() else 0
        if declared_bytes > max_bytes:
            raise _too_large(max_bytes)
        body = bytearray()
        is_complete = declared_bytes <= large_bytes and await self._receive_body(body, large_bytes, max_bytes)
        if is_complete and len(body) <= large_bytes:
            return bytes(body)
        timeout_s = await begin_large(declared_bytes if declared_bytes > large_bytes else max_bytes)
        if not is_complete:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._receive_body(body, max_bytes, max_bytes)
            except TimeoutError:
                message = f"the body, larger than {large_bytes:,} bytes, did not arrive within {timeout_s:g} s"
                raise TandemError(ErrorKind.REQUEST_TIMEOUT, message) from None
        return bytes(body)

    async def _receive_body(self, body: bytearray, enough_bytes: int, max_bytes: int) -> bool:
        """Append what arrives to `body`, and return whether the body is complete: True at its end, False as soon as it
        has more than `enough_bytes` bytes before that."""
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
            if not message.get("more_body", False):
                return True
            if len(body) > enough_bytes:
                return False

    async def run_until_disconnect(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, the coroutine that answers this request, and cancel it when the client disconnects before the
        response is complete.

        Returns when `work` has ended, also where it was cancelled, and raises what it raised. Call this after the body
        was read, because it consumes all further messages of the client.

        `work` runs in a task of its own, because each token resumes all coroutines of its task, from the outermost on,
        and those around `work` are more than those inside."""
        task = asyncio.create_task(work)
        watcher = asyncio.create_task(self._cancel_at_disconnect(task))
        try:
            await task
        except asyncio.CancelledError:
            this_task = asyncio.current_task()
            has_cancelled = watcher.done() and not watcher.cancelled() and watcher.result()
            if not has_cancelled or (this_task is not None and this_task.cancelling()):
                raise
        finally:
            watcher.cancel()
            # A task refers to its exception, whose traceback refers to this frame: a cycle.
            del task, watcher

    async def _cancel_at_disconnect(self, task: asyncio.Future[None]) -> bool:
        """Wait until the client disconnects; return whether `task` was cancelled for that."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        # A server reports a disconnect also after a complete response, when the work may still be cleaning up.
        return not self.complete and task.cancel()


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a JSON body.

    `content`: a struct or a list of structs, which is encoded, or bytes of JSON.
    """
    body = content if isinstance(content, bytes) else msgspec.json.encode(content)
    return Response(body, status, headers, "application/json")


def error_response(error: TandemError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response for an error: the HTTP status of the error's kind, OpenAI's error body, and the given
    `headers` together with those of `error_headers`."""
    extra = {**(headers or {}), **error_headers(error)}
    if error.kind.http == 401:
        extra["www-authenticate"] = "Bearer"
    return json_response(error_body(error), error.kind.http, extra)


def report_defect(request_id: str) -> TandemError:
    """Log the exception that is being handled as a defect of the gateway, and return the error for the client of the
    request."""
    _log.exception("request %s failed because of a defect of the gateway", request_id)
    message = f"internal error; the gateway's log has the reason under request_id={request_id}"
    return TandemError(ErrorKind.INTERNAL, message)


def refusal(error: TandemError) -> tuple[float | None, str | None]:
    """Return the seconds after which a client should retry, and the name of the limit that was exceeded.

    An error with status 429 or 503 is a refusal; if it names no time or no limit, DEFAULT_RETRY_S or the name of its
    kind is returned instead. For any other error the limit is None, and the time is None unless the error names one.
    """
    if error.kind.http not in _REFUSALS:
        return error.retry_after_s, None
    retry_after_s = DEFAULT_RETRY_S if error.retry_after_s is None else error.retry_after_s
    return retry_after_s, error.reason or error.kind.value


def error_headers(error: TandemError) -> dict[str, str]:
    """Return the headers of an error response.

    These are `x-ratelimit-*` where a tenant's rate limit refused the request, and `retry-after` (whole seconds) and
    `x-tandem-reject-reason` (the exceeded limit) from `refusal`, where these are not None.
    """
    headers = rate_limit_headers(error.levels, error.limits) if isinstance(error, RateLimitedError) else {}
    retry_after_s, reject_reason = refusal(error)
    if retry_after_s is not None:
        headers["retry-after"] = str(max(0, math.ceil(retry_after_s)))
    if reject_reason is not None:
        headers["x-tandem-reject-reason"] = header_value(reject_reason)
    return headers


def error_body(error: TandemError) -> bytes:
    """Return OpenAI's error body of an error as JSON. Message and field name are cut, because both may repeat what the
    client sent."""
    param = None if error.param is None else _cut(error.param, _MAX_PARAM_CHARS)
    body = ErrorBody(_cut(error.message, _MAX_MESSAGE_CHARS), error.kind.openai_type, param, error.kind.value)
    return msgspec.json.encode(ErrorReply(body))


def _cut(text: str, num_chars: int) -> str:
    return text if len(text) <= num_chars else f"{text[: num_chars - 3]}..."


def header_value(text: str) -> str:
    """Return `text` as the value of a header: each byte of its UTF-8 that is not printable ASCII becomes `?`."""
    return _UNPRINTABLE.sub(b"?", text.encode("utf-8")).decode("ascii")


def _too_large(limit: int) -> TandemError:
    return TandemError(
        ErrorKind.BODY_TOO_LARGE,
        f"the request body is larger than {int(limit):,} bytes, the limit of this gateway (gateway.max_body)",
    )


class EventStream:
    """Write one response of type text/event-stream to `exchange`: call `open` or `heartbeat` first, then `send` and
    `heartbeat` any number of times, then `close`.

    An error after the first byte is written as one event and ends the stream without `[DONE]`."""

    __slots__ = ("_exchange", "_held")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._held = b""

    async def open(self, headers: Mapping[str, str]) -> None:
        """Send the head of the response, with status 200, the headers of an event stream, and `headers`."""
        self._exchange.late_error = lambda error: self._held + _frame(error_body(error))
        await self._exchange.begin({**_EVENT_HEADERS, **headers})

    async def heartbeat(self, headers: Mapping[str, str]) -> None:
        """Send a comment, which clients skip, so that no proxy closes the connection as dead. Opens the stream with
        `headers` first where it is not open yet."""
        if not self._exchange.started:
            await self.open(headers)
        await self._exchange.write(b": heartbeat\n\n", more=True)

    async def send(self, *events: bytes, more_follow: bool = False) -> None:
        """Send events, each of them one line of JSON.

        `more_follow`: the caller will send further events without waiting. The given events are then held and written
        together with the next ones, or once 16 KiB are held, because a write is half of the cost of a token.
        """
        ready = b"".join((self._held, *map(_frame, events)))
        if more_follow and len(ready) < _FULL_BYTES:
            self._held = ready
        elif ready:
            self._held = b""
            await self._exchange.write(ready, more=True)

    async def close(self, *events: bytes) -> None:
        """Send all held events, `events` and `[DONE]`, which marks a complete stream, and end the response."""
        last = b"".join((self._held, *map(_frame, (*events, b"[DONE]"))))
        self._held = b""
        await self._exchange.write(last, more=False)


def _frame(event: bytes) -> bytes:
    return b"data: %b\n\n" % event
