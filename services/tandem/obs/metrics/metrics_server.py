"""Serve `GET /metrics` and `/health` over HTTP from threads, for programs without an HTTP server of their own.

Each connection serves one request. At most `MAX_CONNECTIONS` are open at a time, and a client that sends or reads too
slowly is disconnected."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from socketserver import TCPServer
from threading import Semaphore, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client.exposition import ThreadingWSGIServer

MAX_CONNECTIONS = 16
"""Largest number of open connections; further ones are closed immediately."""
TIMEOUT_S = 10.0
"""Seconds that a connection may be idle, and that one read or one write of a response may take."""
_POLL_S = 0.05
"""How soon the server notices `close`."""
_TEXT = "text/plain; charset=utf-8"

Exposition = Callable[[str], tuple[str, bytes]]
"""Function that returns content type and body of `/metrics` for the value of an Accept header; called on any thread."""

_log = logging.getLogger(__name__)


class MetricsEndpoint:
    """Serve `/metrics` and `/health` over HTTP between `start` and `close`, from threads.

    `exposition` returns the content of `/metrics`. Port 0 picks a free port; `address` is the actual host:port after
    `start`."""

    def __init__(self, host: str, port: int, exposition: Exposition) -> None:
        self._host = host
        self._port = port
        self._exposition = exposition
        self._server: _Server | None = None
        self.address = ""

    def start(self) -> None:
        """Start listening; does not block. Raises OSError where the port is in use or `host` is not an address of this
        machine."""
        self._server = _Server(self._host, self._port)
        self._server.set_app(self._respond)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.address = f"{host}:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, args=(_POLL_S,), name="metrics-endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; a request that is being served is still answered. A second call does nothing."""
        if self._server is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._server = None

    def _respond(self, environ: dict[str, Any], start_response: Callable[..., object]) -> Sequence[bytes]:
        """Respond to one request, as a WSGI application."""
        is_head = environ["REQUEST_METHOD"] == "HEAD"
        if environ["REQUEST_METHOD"] != "GET" and not is_head:
            status, content_type, body = "405 Method Not Allowed", _TEXT, b"there is GET and HEAD\n"
        elif environ["PATH_INFO"] == "/metrics":
            status, content_type, body = self._metrics(environ.get("HTTP_ACCEPT", ""))
        elif environ["PATH_INFO"] == "/health":
            status, content_type, body = "200 OK", _TEXT, b"ok\n"
        else:
            status, content_type, body = "404 Not Found", _TEXT, b"there is /metrics and /health\n"
        start_response(status, [("Content-Type", content_type), ("Content-Length", str(len(body)))])
        return [] if is_head else [body]

    def _metrics(self, accept: str) -> tuple[str, str, bytes]:
        try:
            return "200 OK", *self._exposition(accept)
        except Exception:
            _log.exception("the metrics could not be collected, and GET /metrics is answered with status 500")
            return "500 Internal Server Error", _TEXT, b"the log has the reason\n"


class _Server(ThreadingWSGIServer):
    """Serve each connection from a daemon thread."""

    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int) -> None:
        self._free = Semaphore(MAX_CONNECTIONS)
        self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__((str(address[0]), int(address[1])), _Handler)

    def server_bind(self) -> None:
        """Bind without looking up this machine's name, which is not needed and may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._free.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except Exception:
            self._free.release()  # no thread has started
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at DEBUG: mostly the client has disconnected."""
        _log.debug("a connection of %s to the metrics port broke", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        _log.debug("the metrics port answered %s: " + format, self.client_address[0], *args)
