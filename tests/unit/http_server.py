"""HTTP servers that tests script, each on a thread."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    """Handler that logs nothing."""

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def serving(
    handler: Callable[..., BaseHTTPRequestHandler], context: ssl.SSLContext | None = None
) -> Iterator[ThreadingHTTPServer]:
    """Serve at a free port of 127.0.0.1 until the block ends. `context`: serve TLS with it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
