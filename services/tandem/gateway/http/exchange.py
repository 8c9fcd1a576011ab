"""Read the request, write the response or error, and watch for a disconnect, for one HTTP exchange over plain ASGI."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from typing import Any

import msgspec

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.rate_limit_status import refusal_headers
from tandem.gateway.context.request_context import label_of

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

_REFUSALS = (429, 503)
DEFAULT_RETRY_S = 1.0
"""Seconds in `retry-after` for refusals whose error names no time."""
_UNPRINTABLE = re.compile(rb"[^\x20-\x7e]")


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete."""


class Exchange:
    """One HTTP request and its one response.

    `request_id`: the client's `x-request-id` where that is 1 to 128 visible ASCII characters, else a new one; every
    response carries it. It is only a label and identifies nothing, because clients repeat theirs. `started`: the head
    of the response was sent. `complete`: its whole body was sent.
    """

    __slots__ = (
        "_headers", "_receive", "_send", "complete", "is_counted", "late_error", "request_id", "scope", "started",
        "status",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._headers: dict[bytes, bytes] = dict(reversed(list(scope["headers"])))
        self._receive = receive
        self._send = send
        self.started = False
        self.complete = False
        self.status = 0
        """Status of the response; 0 before its head was sent."""
        self.is_counted = True
        """Whether metrics count the response; the console's own requests are not traffic."""
        self.late_error: Callable[[TandemError], bytes] | None = None
        """Formats an error for a response whose head was sent; None where such a response cannot hold an error."""
        self.request_id = label_of(self.header(b"x-request-id"))

    def header(self, name: bytes) -> bytes | None:
        """Return the value of the first header with this lower-case name; None without one."""
        return self._headers.get(name)

    async def read_body(self, limit: int) -> bytes:
        """Read the whole body of at most `limit` bytes.

        Raises BODY_TOO_LARGE as soon as the size is known; UNSUPPORTED where the body is compressed, because a small
        one could expand to any size; or ClientDisconnected. The HTTP server discards what the client still sends after
        an error, so that the connection can be used again.
        """
        encoding = self.header(b"content-encoding") or b"identity"
        if encoding.strip().lower() != b"identity":
            name = encoding.decode("latin-1")
            reason = f"content-encoding {name!r} is not supported; send the body uncompressed"
            raise TandemError(ErrorKind.UNSUPPORTED, reason, param="content-encoding")
        length = self.header(b"content-length") or b"0"
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            body += message.get("body", b"")
            if len(body) > limit:
                raise _too_large(limit)
            if not message.get("more_body", False):
                return bytes(body)

    async def run_until_disconnect(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine that answers this request, and cancel it when the client disconnects before the response is
        complete.

        Call this after the body was read, because it consumes all further messages of the client.
        """
        task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if watcher.done() and not self.complete:
                task.cancel()
            # A server reports a disconnect also after a complete response, when the work may still be cleaning up.
            await asyncio.wait({task})
        finally:
            watcher.cancel()
            task.cancel()
            await asyncio.wait({task, watcher})
        try:
            if not task.cancelled():
                task.result()
        finally:
            del task  # its exception's traceback refers to this frame: a cycle that only the garbage collector frees

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        self.started = True
        self.status = status
        labelled = [*headers, (b"x-request-id", self.request_id.encode("ascii"))]
        await self._send({"type": "http.response.start", "status": status, "headers": labelled})

    async def write(self, body: bytes, *, more: bool) -> None:
        self.complete = not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def send_json(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        await self._send_whole(status, b"application/json", body, headers)

    async def send_body(self, content_type: str, body: bytes) -> None:
        await self._send_whole(200, content_type.encode(), body, ())

    async def _send_whole(self, status: int, content_type: bytes, body: bytes, headers: Iterable[Header]) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [(b"content-type", content_type), length, *headers])
        await self.write(body, more=False)

    async def send_error(self, error: TandemError, headers: Iterable[Header] = ()) -> None:
        """Send OpenAI's error body with the status of the error table. Refusals for lack of capacity also have the
        headers `retry-after` and `x-tandem-reject-reason`, the exceeded limit."""
        status = error.facts.http
        extra = [*headers, *refusal_headers(error)]
        retry_after_s, reject_reason = refusal(error)
        if reject_reason is not None:
            extra.append((b"x-tandem-reject-reason", header_value(reject_reason)))
        if retry_after_s is not None:
            extra.append((b"retry-after", str(max(0, math.ceil(retry_after_s))).encode()))
        if status == 401:
            extra.append((b"www-authenticate", b"Bearer"))
        await self.send_json(status, error_body(error), extra)


def refusal(error: TandemError) -> tuple[float | None, str | None]:
    """Return after how many seconds to retry, and the exceeded limit; the latter is None for an error that is no
    refusal."""
    if error.facts.http not in _REFUSALS:
        return error.retry_after_s, None
    retry_after_s = DEFAULT_RETRY_S if error.retry_after_s is None else error.retry_after_s
    return retry_after_s, error.reason or error.kind.value


def error_body(error: TandemError) -> bytes:
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": error.facts.openai_type,
                "param": error.param,
                "code": error.kind.value,
            }
        }
    )


def header_value(text: str) -> bytes:
    """Encode a header's value; bytes other than printable ASCII become `?`."""
    return _UNPRINTABLE.sub(b"?", text.encode("utf-8"))


def _too_large(limit: int) -> TandemError:
    return TandemError(ErrorKind.BODY_TOO_LARGE, f"the request body is larger than {limit} bytes")
