"""Serve `GET /metrics` and `/health` over HTTP from threads, for programs without an HTTP server of their own.

At most `MAX_CONNECTIONS` are open at a time, and a client that sends or reads too slowly is disconnected."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer
from threading import Thread
from typing import Any

MAX_CONNECTIONS = 16
"""Open connections; further ones are closed at once."""
TIMEOUT_S = 10.0
"""How long a connection may be idle, and how long one read or one response may take."""
_POLL_S = 0.05
"""How soon the server notices `close`."""

Exposition = Callable[[str], tuple[str, bytes]]
"""Function from an Accept header to the content type and the body; called on any thread."""

_log = logging.getLogger(__name__)


class MetricsEndpoint:
    """Own the server, which listens at `address` (host:port) between `start` and `close`; port 0 picks a free port."""

    def __init__(self, host: str, port: int, exposition: Exposition) -> None:
        self._host = host
        self._port = port
        self._exposition = exposition
        self._server: _Server | None = None
        self._thread: Thread | None = None
        self.address = ""

    def start(self) -> None:
        """Start listening. Raises OSError where the port is taken or the host is not an address of this machine."""
        server = _Server(self._host, self._port, self._exposition)
        self.address = (
            f"[{self._host}]:{server.server_port}" if ":" in self._host else f"{self._host}:{server.server_port}"
        )
        self._server = server
        self._thread = Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics-endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and cut open connections, which ends their threads. May be called more than once."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.cut()


class _Server(HTTPServer):
    """Serve each connection from a daemon thread."""

    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, exposition: Exposition) -> None:
        self.exposition = exposition
        self._open: dict[socket.socket, Thread] = {}
        self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__((str(address[0]), int(address[1])), _Handler)

    def server_bind(self) -> None:
        """Bind without looking up this machine's name, which is not needed and may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self._open) < MAX_CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = Thread(target=self._serve, args=(request, client_address), name="metrics-connection", daemon=True)
        self._open[request] = thread
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at DEBUG: mostly the client has disconnected."""
        _log.debug("metrics: a connection of %s broke", client_address, exc_info=True)

    def cut(self) -> None:
        for connection, thread in list(self._open.items()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:
            self.handle_error(request, client_address)
        finally:
            self.shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "tandem"
    sys_version = ""
    timeout = TIMEOUT_S
    disable_nagle_algorithm = True  # headers and body are two writes
    server: _Server

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                self._respond(*self._metrics())
            case "/health":
                self._respond(HTTPStatus.OK, "text/plain; charset=utf-8", b"ok\n")
            case _:
                self._respond(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"there is /metrics and /health\n")

    do_HEAD = do_GET

    def _metrics(self) -> tuple[HTTPStatus, str, bytes]:
        try:
            return HTTPStatus.OK, *self.server.exposition(self.headers.get("Accept", ""))
        except Exception:
            _log.exception("metrics: they could not be collected")
            return HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", b"the log has the reason\n"

    def _respond(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.send_header("Connection", "close")  # the unread body would be parsed as the next request
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        _log.debug("metrics: %s " + format, self.client_address[0], *args)
