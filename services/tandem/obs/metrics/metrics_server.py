"""A small HTTP server for `GET /metrics` of programs that have no other, on threads of its own; never counts anything.

It serves nothing else but `/health`, a few connections at a time, and leaves whoever sends or reads too slowly.
"""

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
"""Further ones are closed as they come."""
TIMEOUT_S = 10.0
"""How long a connection may be idle, and how long one read or one answer may take."""
_POLL_S = 0.05
"""How soon `close` is noticed."""

Exposition = Callable[[str], tuple[str, bytes]]
"""An Accept header -> the content type and the body; on any thread."""

_log = logging.getLogger(__name__)


class MetricsEndpoint:
    """Between `start` and `close` it listens at `address`, which is host:port; `port` 0 takes a free one."""

    def __init__(self, host: str, port: int, exposition: Exposition) -> None:
        self._host = host
        self._port = port
        self._exposition = exposition
        self._server: _Server | None = None
        self._thread: Thread | None = None
        self.address = ""

    def start(self) -> None:
        """OSError: the port is taken, or the host is none of this machine's."""
        server = _Server(self._host, self._port, self._exposition)
        self.address = (
            f"[{self._host}]:{server.server_port}" if ":" in self._host else f"{self._host}:{server.server_port}"
        )
        self._server = server
        self._thread = Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics-endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody listens any more, and connections are cut, which ends their threads. More than once is fine."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.cut()


class _Server(HTTPServer):
    """A daemon thread for each connection."""

    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, exposition: Exposition) -> None:
        self.exposition = exposition
        self._open: dict[socket.socket, Thread] = {}
        self.address_family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__((str(where[0]), int(where[1])), _Handler)

    def server_bind(self) -> None:
        """Without the look-up of this machine's name, which nobody needs and which can take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self._open) < MAX_CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        serve = Thread(target=self._serve, args=(request, client_address), name="metrics-connection", daemon=True)
        self._open[request] = serve
        serve.start()

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Mostly whoever asked has gone."""
        _log.debug("metrics: a connection of %s broke", client_address, exc_info=True)

    def cut(self) -> None:
        for connection, serve in list(self._open.items()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            serve.join()

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
                self._answer(*self._metrics())
            case "/health":
                self._answer(HTTPStatus.OK, "text/plain; charset=utf-8", b"ok\n")
            case _:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"there is /metrics and /health\n")

    do_HEAD = do_GET

    def _metrics(self) -> tuple[HTTPStatus, str, bytes]:
        try:
            return HTTPStatus.OK, *self.server.exposition(self.headers.get("Accept", ""))
        except Exception:
            _log.exception("metrics: they could not be collected")
            return HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", b"the log has the reason\n"

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.send_header("Connection", "close")  # a body that nobody reads would be taken for the next request
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        _log.debug("metrics: %s " + format, self.client_address[0], *args)
