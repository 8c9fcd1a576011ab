"""Guards one HTTP connection of uvicorn's against clients that send or read badly; never knows a route.

Uvicorn bounds bodies by the application's reading and idle connections by their keep-alive time, and leaves the rest
open: how large a head may be, how long a request may take to arrive, how many may wait behind another on one
connection, how long a response may wait for its reader, how many connections there are. All of that is here.
"""

from __future__ import annotations

import logging
import math
from asyncio import TimerHandle, Transport
from collections import deque
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.http.exchange import error_body

_log = logging.getLogger(__name__)
_LINE_BYTES = 4
"""What a header takes in a head beside its name and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Of one server. Of more than `max_connections` only those that ask for one of `probes` at once are answered, and
    only `probe_room` of them at a time: who restarts a process because it is busy makes nothing better. A request has
    `request_timeout_s` from its first byte, or from the opening of its connection, to its last byte. A response that a
    client takes nothing of is cut after `stalled_client_s`. After a refusal a connection is read, and thrown away, for
    `linger_s`: closed at once, it would take the refusal with it."""

    request_timeout_s: float = 60.0
    stalled_client_s: float = 60.0
    keep_alive_s: float = 75.0
    linger_s: float = 2.0
    max_connections: int = 4096
    probes: frozenset[bytes] = frozenset()
    probe_room: int = 64
    max_head_bytes: int = 32 << 10
    max_headers: int = 100
    max_pipelined: int = 16


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. The two timers of its own run only while the client owes something: bytes of a request, or room
    for those of a response. While nobody owes anything uvicorn's keep-alive timer runs: from when both the last request
    and its answer are over, until the next request begins. Stray bytes between requests put nothing off."""

    def __init__(self, limits: HttpLimits, **server: Any) -> None:
        super().__init__(**server)
        self._limits = limits
        self._is_refused = False
        self._is_extra = False  # one of too many, which may only probe
        self._refusal: TandemError | None = None
        self._request_timer: TimerHandle | None = None
        self._reader_timer: TimerHandle | None = None
        self._has_begun = False  # a request whose last byte is not here yet
        self._in_head = True  # the request that comes, or may come, has no cycle yet: `cycle` is that of the one before
        self._cycles: deque[RequestResponseCycle] = deque()  # of requests without a whole answer, in order
        self._num_head_bytes = self._num_headers = 0
        self._num_kept_bytes = 0  # fed since the parser last told us something: it keeps what is incomplete

    # ---- the transport's calls

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits = self._limits
        self._is_extra = len(self.connections) > limits.max_connections
        self._await_request()
        if len(self.connections) > limits.max_connections + limits.probe_room:
            self._refuse(self._too_many())

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._request_timer, self._reader_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # Uvicorn tells only the last request that came in, which need not be the one that is being answered.
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_kept_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or TandemError(ErrorKind.INVALID_REQUEST, "this is not HTTP"))
        else:
            if self._num_kept_bytes > self._limits.max_head_bytes:
                self._refuse(self._head_too_large())

    def _feed(self, data: bytes) -> None:
        """An offer to speak another protocol is not taken, and the parser must not know of it: it would take the body
        for that protocol. Java's client offers h2c with its first request."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if method == b"CONNECT":
                raise httptools.HttpParserError("no proxy") from None
            head = [method + b" " + self.url + b" HTTP/" + version]
            head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"\r\n".join([*head, b"\r\n"]) + data[offer.args[0] :])

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader_timer is None:
            self._reader_timer = self.loop.call_later(self._limits.stalled_client_s, self._reader_stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    # ---- the parser's calls; what they raise comes out of `feed_data` as an HttpParserError

    def on_message_begin(self) -> None:
        self._num_kept_bytes = self._num_head_bytes = self._num_headers = 0
        self._has_begun = True
        self._unset_keepalive_if_required()
        if self._request_timer is None:
            self._await_request()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also of trailers."""
        self._num_headers += 1
        self._count_head(len(name) + len(value) + _LINE_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self._is_extra and self.url not in self._limits.probes:
            raise self._refused(self._too_many())
        if len(self._cycles) > self._limits.max_pipelined:
            raise self._refused(TandemError(ErrorKind.INVALID_REQUEST, "too many requests wait on this connection"))
        super().on_headers_complete()
        self._in_head = False
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_kept_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_kept_bytes = 0
        self._has_begun, self._in_head = False, True
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None
        super().on_message_complete()
        if not self._cycles:  # it was answered before all of it was here
            self._await_another()

    def on_response_complete(self) -> None:
        self._cycles.popleft()
        if self._request_timer is not None and self._has_begun and self._in_head:
            # The next request was kept waiting; its time begins now.
            self._request_timer.cancel()
            self._await_request()
        super().on_response_complete()
        if self._has_begun:
            self._unset_keepalive_if_required()

    # ---- inside

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        knows_chunks = cycle.scope["http_version"] >= "1.1"
        super()._start_asgi_task(cycle, app if knows_chunks else partial(_without_chunks, cycle, app))

    def _count_head(self, num_bytes: int) -> None:
        self._num_kept_bytes = 0
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._limits.max_head_bytes or self._num_headers > self._limits.max_headers:
            raise self._refused(self._head_too_large())

    def _head_too_large(self) -> TandemError:
        limits = self._limits
        return TandemError(
            ErrorKind.HEADERS_TOO_LARGE,
            f"the request's head has more than {limits.max_head_bytes} bytes or {limits.max_headers} headers",
        )

    def _too_many(self) -> TandemError:
        reason = f"{self._limits.max_connections} connections are open already"
        return TandemError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0, reason="connections")

    def _refused(self, error: TandemError) -> TandemError:
        self._refusal = error
        return error

    def _await_request(self) -> None:
        limits = self._limits
        timeout_s = min(limits.linger_s, limits.request_timeout_s) if self._is_extra else limits.request_timeout_s
        self._request_timer = self.loop.call_later(timeout_s, self._request_overdue)

    def _await_another(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _request_overdue(self) -> None:
        self._request_timer = None
        if self._owes_answer():
            # The client waits for us, and we may have stopped reading.
            self._await_request()
        elif self._has_begun:
            limit = self._limits.request_timeout_s
            self._refuse(TandemError(ErrorKind.REQUEST_TIMEOUT, f"the request was not complete within {limit:g} s"))
        else:
            self.transport.abort()

    def _owes_answer(self) -> bool:
        """To a request before the one that comes in."""
        return len(self._cycles) > (0 if self._in_head else 1)

    def _reader_stalled(self) -> None:
        """The disconnect cancels the request everywhere."""
        _log.info("a client took nothing of its response for %g s", self._limits.stalled_client_s)
        self.transport.abort()

    def _refuse(self, error: TandemError) -> None:
        """Answer and end the connection. Where that answer would come in the middle of another, only end it."""
        cycle = None if self._in_head else self.cycle
        if self._owes_answer() or (cycle is not None and cycle.response_started):
            self.transport.abort()
            return
        self._is_refused = True
        self._unset_keepalive_if_required()
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(_response(error))
        self.transport.write_eof()
        if self._request_timer is not None:
            self._request_timer.cancel()
        self._request_timer = self.loop.call_later(self._limits.linger_s, self.transport.abort)


async def _without_chunks(cycle: RequestResponseCycle, app: Any, scope: Any, receive: Any, send: Any) -> None:
    """To a client of HTTP/1.0, which knows none: what has no length ends with its connection. Uvicorn takes that way
    only where it thinks that it knows the length, so each part is announced as all that is to come."""
    cycle.keep_alive = False
    has_length = True

    async def send_unchunked(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_unchunked)


def _response(error: TandemError) -> bytes:
    body, status = error_body(error), error.facts.http
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    if error.retry_after_s is not None:
        lines.append(f"retry-after: {math.ceil(error.retry_after_s)}")
    if error.reason:
        lines.append(f"x-tandem-reject-reason: {error.reason}")
    return "\r\n".join([*lines, "\r\n"]).encode("ascii") + body
