"""Limit what one HTTP connection may cost the server, as a subclass of uvicorn's protocol.

Uvicorn itself receives a body only as fast as the application reads it, and closes idle connections after their
keep-alive time. This module adds the other limits: the size of a request's head, the time and the rate in which a
request arrives, what is kept of pipelined requests, the time that a response waits for a client that does not read, the
number of connections, and the hosts that requests may name.
"""

from __future__ import annotations

import fcntl
import logging
import sys
import termios
from asyncio import TimerHandle, Transport
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError, invalid_request
from tandem.gateway.http.exchange import NO_SNIFFING, error_body, error_headers
from tandem.gateway.http.host_header import EVERY_HOST, AllowedHosts, requested_host

_log = logging.getLogger(__name__)
_LINE_BYTES = 4
"""Bytes of a header line besides its name and its value: colon, space, CR and LF."""
_EMPTY_LINE = b"\r\n\r\n"
"""Bytes that end the head of a request; httptools accepts no other line ends."""
_MAX_PARTS = 64
"""Number of parts in which received bytes are parsed at most; each costs half a microsecond and more."""
_MAX_PARSED = 3
"""Largest number of requests of one connection that wait in parsed form."""
_MAX_UNPARSED_BYTES = 64 << 10
"""Number of received bytes behind an unanswered request from which on the connection is not read."""
_LATE_S = 0.5
"""Seconds by which a timer fires late where this process stood still."""
_CONFIRM_S = 0.5
"""Seconds that a TLS client that has received everything has to confirm that its connection ends, when the server
stops."""
_NOT_HTTP = (
    "the request is not valid HTTP/1.1; for TLS, set gateway.tls_cert_file; for HTTP/2, put a proxy before this port"
)
_NO_CERTIFICATE = "this gateway requires a client certificate (gateway.tls_client_ca_file); none was presented"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of one HTTP server; times are in seconds.

    `request_timeout_s`: longest time from the opening of a connection, or from the first byte of a later request, to
    the last byte of the request. `min_body_bytes_per_s`: lowest average rate of a body, required from `body_grace_s`
    seconds after its beginning on; 0: no such limit. `stalled_client_s`: a connection is aborted when its client reads
    nothing of a response for this long. `keep_alive_s`: a connection without a request is closed after this long.
    `linger_s`: after a refusal, received bytes are discarded for this long before the connection is closed, because a
    close with unread bytes would reset the connection and lose the refusal. `handshake_s`: longest time of a TLS
    handshake, during which a connection does not count for `max_connections`.

    `max_connections`: number of connections beyond which new ones may request only the paths in `probes`, so that a
    busy process is not restarted for failed health checks. `probe_room`: largest number of such additional connections.
    `max_head_bytes`, `max_headers`: largest size and number of headers of one request.

    `requires_certificate`: a client that presented no certificate when it connected may likewise request only the paths
    in `probes`, so that Kubernetes, which has no certificate, can check the gateway's health. `allowed_hosts`: requests
    for other hosts are refused, except for the paths in `probes`, which load balancers request with any Host."""

    request_timeout_s: float = 60.0
    min_body_bytes_per_s: float = 240.0
    body_grace_s: float = 5.0
    stalled_client_s: float = 60.0
    keep_alive_s: float = 75.0
    linger_s: float = 2.0
    handshake_s: float = 10.0
    max_connections: int = 4096
    probes: frozenset[bytes] = frozenset()
    probe_room: int = 64
    max_head_bytes: int = 32 << 10
    max_headers: int = 100
    requires_certificate: bool = False
    allowed_hosts: AllowedHosts = EVERY_HOST

    @classmethod
    def of(cls, config: GatewayConfig, probes: frozenset[bytes]) -> HttpLimits:
        """Return the limits by the settings of a gateway; limits without a setting keep their defaults. `probes`: paths
        of health probes."""
        return cls(
            request_timeout_s=config.request_timeout_s,
            min_body_bytes_per_s=config.min_body_bytes_per_s,
            body_grace_s=config.body_grace_s,
            stalled_client_s=config.stalled_client_s,
            max_connections=config.max_connections,
            probes=probes,
            allowed_hosts=AllowedHosts.of(config.host, config.host_patterns),
        )


class LimitedHttpProtocol(HttpToolsProtocol):
    """Handle one HTTP connection as uvicorn's protocol does, within HttpLimits: a request beyond a limit gets an error
    response after the responses to earlier requests, and the connection is closed. `on_refusal`: called with the error
    of each such response, which the application does not see. `server`: the arguments of uvicorn's own protocol.

    Requests are parsed one by one: the bytes after a request are kept unparsed until it is answered, so that a client
    may pipeline any number of requests. Several requests, at most _MAX_PARSED, are parsed together where the parser
    cannot be stopped between them: where the end of one arrives in the same bytes as the head of the next one, and
    after a chunked body with more than _MAX_PARTS empty lines.

    The request timer runs while the client has to send bytes of a request. The body timer runs while the client has to
    send the rest of a body whose beginning has arrived. The reader timer runs while the client has to read bytes of a
    response. Uvicorn's keep-alive timer runs from the end of the last request and its response to the beginning of the
    next request; stray bytes between requests do not restart it."""

    def __init__(
        self, limits: HttpLimits, on_refusal: Callable[[TandemError], None] | None = None, **server: Any
    ) -> None:
        super().__init__(**server)
        self._limits = limits
        self._on_refusal = on_refusal
        self._is_refused = False
        self._address = ""  # of this side of the connection
        self._is_extra = False  # beyond `max_connections`: only probes are answered
        self._lacks_certificate = False  # likewise
        self._refusal: TandemError | None = None
        self._late_refusal: TandemError | None = None  # waits for the responses to earlier requests
        self._unparsed = b""  # received behind a request that is not answered yet
        self._num_body_left: int | None = None  # bytes to come of a body whose head names its length
        self._request_timer: TimerHandle | None = None
        self._body_timer: TimerHandle | None = None
        self._reader_timer: TimerHandle | None = None
        self._confirm_timer: TimerHandle | None = None
        self._has_begun = False  # a request has begun to arrive and its last byte has not arrived yet
        self._in_head = True  # the arriving or next request has no cycle yet: `cycle` belongs to the request before it
        self._cycles: deque[RequestResponseCycle] = deque()  # of requests without a complete response, in order
        self._num_head_bytes = 0
        self._num_headers = 0
        self._body_began_at = 0.0
        self._num_body_bytes = 0  # since `_body_began_at`
        self._num_kept_bytes = 0  # fed to the parser since its last callback; it buffers incomplete elements

    # ---- the transport's calls

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _BoundedFlow(transport, self._has_enough)
        limits = self._limits
        self._is_extra = len(self.connections) > limits.max_connections
        if self.server is not None:
            self._address = self.server[0].removeprefix("::ffff:")  # an IPv4 client of an IPv6 socket
        self._lacks_certificate = limits.requires_certificate and not transport.get_extra_info("peercert")
        self._await_request()
        if len(self.connections) > limits.max_connections + limits.probe_room:
            self._refuse(self._too_many())

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._request_timer, self._body_timer, self._reader_timer, self._confirm_timer):
            if timer is not None:
                timer.cancel()
        self._unparsed = b""
        super().connection_lost(exc)
        # Uvicorn notifies only the cycle of the last received request, which need not be the one being answered.
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._unparsed:
            self._unparsed += data
        else:
            self._parse(data)
        if self._has_enough():
            self.flow.pause_reading()

    def _has_enough(self) -> bool:
        return len(self._unparsed) > _MAX_UNPARSED_BYTES

    def _parse(self, data: bytes) -> None:
        """Parse received bytes up to the end of a request that is not answered at once, and keep the rest.

        They are parsed up to the end of a body, or up to one empty line at a time, because the parser cannot be stopped
        where a request ends."""
        start = num_parts = 0
        while start < len(data) and not self._is_refused:
            if self._owes_answer():
                self._unparsed = data[start:]
                return
            num_parts += 1
            if self._num_body_left:
                end = min(start + self._num_body_left, len(data))
            elif num_parts < _MAX_PARTS and (found := data.find(_EMPTY_LINE, start)) >= 0:
                end = found + len(_EMPTY_LINE)
            else:
                end = len(data)
            self._parse_part(data[start:end])
            start = end

    def _parse_part(self, data: bytes) -> None:
        self._num_kept_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or invalid_request(_NOT_HTTP))
        else:
            if self._num_kept_bytes > self._limits.max_head_bytes:
                self._refuse(self._head_too_large())
            elif not self._in_head and self._body_timer is None and self._limits.min_body_bytes_per_s:
                self._await_body()

    def _feed(self, data: bytes) -> None:
        """Feed bytes to the parser, and ignore an `upgrade` to another protocol.

        The head is fed again without that header to a new parser, because httptools would take the body for the other
        protocol. Java's HTTP client offers h2c with its first request."""
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

    def shutdown(self) -> None:
        """End an idle connection now, and a busy one after its response; uvicorn calls this when the server stops. A
        connection with TLS ends when its client confirms the end. An idle client reads nothing and so does not confirm;
        its connection is aborted once all bytes were sent."""
        super().shutdown()
        if self.scheme == "https" and self.transport.is_closing():
            self._confirm_timer = self.loop.call_later(_CONFIRM_S, self._abort_when_sent)

    # ---- the parser's callbacks; `feed_data` raises their exceptions as HttpParserError

    def on_message_begin(self) -> None:
        self._num_kept_bytes = 0
        self._num_head_bytes = 0
        self._num_headers = 0
        self._has_begun = True
        self._unset_keepalive_if_required()
        if self._request_timer is None:
            self._await_request()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count one header of the head or of the trailers, and pass it to uvicorn. Raises HEADERS_TOO_LARGE beyond the
        limits."""
        self._num_headers += 1
        self._count_head(len(name) + len(value) + _LINE_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        try:
            host = requested_host(self.headers, self.url, self.parser.get_http_version())
        except TandemError as error:
            raise self._refused(error) from None
        if self.url not in self._limits.probes:
            if self._is_extra:
                raise self._refused(self._too_many())
            if self._lacks_certificate:
                raise self._refused(TandemError(ErrorKind.UNAUTHENTICATED, _NO_CERTIFICATE))
            if not self._limits.allowed_hosts.allow(host, self._address):
                message = f"this gateway does not serve the host {host[:100]!r}: add it to gateway.allowed_hosts"
                raise self._refused(TandemError(ErrorKind.MISDIRECTED, message, param="host"))
        if len(self._cycles) >= _MAX_PARSED:
            message = "too many requests wait on this connection: open more connections"
            raise self._refused(invalid_request(message))
        super().on_headers_complete()
        self._in_head = False
        length = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        self._num_body_left = length or None
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_kept_bytes = 0
        self._num_body_bytes += len(body)
        if self._num_body_left is not None:
            self._num_body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_kept_bytes = 0
        self._has_begun = False
        self._in_head = True
        self._num_body_left = None
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None
        self._end_body_timer()
        super().on_message_complete()
        if not self._cycles:  # the request was answered before all of it had arrived
            self._await_another()

    def on_response_complete(self) -> None:
        self._cycles.popleft()
        if self._request_timer is not None and self._has_begun and self._in_head:
            # Reading was paused while the next request began to arrive; its time begins now.
            self._request_timer.cancel()
            self._await_request()
        super().on_response_complete()
        if self._has_begun:
            self._unset_keepalive_if_required()
        if self._owes_answer() or self.transport.is_closing():
            return
        if self._late_refusal is not None:
            self._send_refusal(self._late_refusal)
        elif self._unparsed:
            data, self._unparsed = self._unparsed, b""
            self._parse(data)
            self.flow.resume_reading()  # unless there is enough still

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
            f"the headers are too large: at most {limits.max_head_bytes:,} bytes and {limits.max_headers} headers",
        )

    def _too_many(self) -> TandemError:
        reason = f"{self._limits.max_connections} connections are open (gateway.max_connections); retry later"
        return TandemError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0, reason="connections")

    def _refused(self, error: TandemError) -> TandemError:
        self._refusal = error
        return error

    def _await_body(self) -> None:
        self._num_body_bytes = 0
        self._body_began_at = self.loop.time()
        self._check_body_in(self._limits.body_grace_s)

    def _check_body_in(self, delay_s: float) -> None:
        due_at = self.loop.time() + delay_s
        self._body_timer = self.loop.call_later(delay_s, self._check_body, due_at)

    def _check_body(self, due_at: float) -> None:
        """Refuse a request whose body arrives more slowly than `min_body_bytes_per_s`. Measure anew where this process
        may be what delays the body (`_delays_request`), or may have stood still with bytes unread, so that this timer
        fired late."""
        limits, now = self._limits, self.loop.time()
        if self._delays_request() or now - due_at > _LATE_S:
            self._await_body()
            return
        ahead_s = self._num_body_bytes / limits.min_body_bytes_per_s - (now - self._body_began_at)
        if ahead_s > 0:
            self._check_body_in(max(ahead_s, limits.body_grace_s))
            return
        message = (
            f"the body arrived at less than {limits.min_body_bytes_per_s:g} bytes per second "
            "(gateway.min_body_bytes_per_s)"
        )
        self._refuse(TandemError(ErrorKind.REQUEST_TIMEOUT, message))

    def _end_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _await_request(self) -> None:
        limits = self._limits
        timeout_s = min(limits.linger_s, limits.request_timeout_s) if self._is_extra else limits.request_timeout_s
        self._request_timer = self.loop.call_later(timeout_s, self._request_overdue)

    def _await_another(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _request_overdue(self) -> None:
        self._request_timer = None
        if self._delays_request():
            self._await_request()
        elif self._has_begun:
            limit = self._limits.request_timeout_s
            self._refuse(
                TandemError(
                    ErrorKind.REQUEST_TIMEOUT,
                    f"the request was not complete within {limit:g} s (gateway.request_timeout_s)",
                )
            )
        else:
            self.transport.abort()

    def _delays_request(self) -> bool:
        """Return whether the arriving request waits for this server: for the responses to earlier requests, or for the
        application, which reads large bodies in turns. Until then bytes are left unread, and a client that expects `100
        Continue` sends none."""
        is_expected = not self._in_head and self.cycle.waiting_for_100_continue
        return self._owes_answer() or self.flow.read_paused or is_expected

    def _owes_answer(self) -> bool:
        """Return whether a request before the arriving one has no complete response yet."""
        return len(self._cycles) > (0 if self._in_head else 1)

    def _reader_stalled(self) -> None:
        """Abort a connection whose client does not read; the disconnect cancels the request at every worker."""
        _log.info(
            "the gateway closed a connection whose client had read nothing of its response for %g s"
            " (gateway.stalled_client_s)",
            self._limits.stalled_client_s,
        )
        self.transport.abort()

    def _abort_when_sent(self) -> None:
        """Abort the connection once its client's kernel has the whole response.

        uvloop does not report the bytes that its TCP transport holds below TLS, but while it holds any the kernel has
        bytes to send."""
        if self.transport.get_write_buffer_size() or _num_unconfirmed(self.transport.get_extra_info("socket")):
            self._confirm_timer = self.loop.call_later(_CONFIRM_S, self._abort_when_sent)
        else:
            self.transport.abort()

    def _refuse(self, error: TandemError) -> None:
        """Send an error after the responses to earlier requests, and end the connection. Where the response to the
        refused request has begun, only end the connection, because the error would be written into that response."""
        self._is_refused = True
        self._unparsed = b""
        self._end_body_timer()
        cycle = None if self._in_head else self.cycle
        if self._owes_answer():
            self._late_refusal = error
            if cycle is not None:  # the refused request, which waits for its turn
                self.pipeline.clear()
                self._cycles.pop()
                self._in_head = True
        elif cycle is not None and cycle.response_started:
            self.transport.abort()
        else:
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
            self._send_refusal(error)

    def _send_refusal(self, error: TandemError) -> None:
        self._unset_keepalive_if_required()
        self.transport.write(_response(error))
        if self._on_refusal is not None:
            self._on_refusal(error)
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        if self._request_timer is not None:
            self._request_timer.cancel()
        self._request_timer = self.loop.call_later(self._limits.linger_s, self.transport.abort)


class _BoundedFlow(FlowControl):
    """Uvicorn's flow control, which does not resume reading while `has_enough`: uvicorn itself resumes it after each
    response and whenever the application reads."""

    def __init__(self, transport: Transport, has_enough: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._has_enough = has_enough

    def resume_reading(self) -> None:
        if not self._has_enough():
            super().resume_reading()


async def _without_chunks(cycle: RequestResponseCycle, app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Run the application for a client of HTTP/1.0, which knows no chunked encoding: a response without a length ends
    with its connection. Uvicorn leaves out the chunk framing only where it believes that it knows the length, so that
    each part is declared to be the whole remaining length."""
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


def _num_unconfirmed(socket: Any) -> int:
    """Return how many bytes the kernel has to send or has not seen confirmed; 0 for a closed socket, and where the
    kernel does not tell."""
    try:
        return int.from_bytes(fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0


def _response(error: TandemError) -> bytes:
    body, status = error_body(error), error.kind.http
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        b": ".join(NO_SNIFFING).decode(),
        *(f"{name}: {value}" for name, value in error_headers(error).items()),
    ]
    return "\r\n".join([*lines, "\r\n"]).encode("ascii") + body
