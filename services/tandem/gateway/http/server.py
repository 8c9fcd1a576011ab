"""Run an ASGI application under uvicorn on the caller's event loop, without uvicorn's signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn

from tandem.core.errors import TandemError
from tandem.gateway.http.protocol_limits import HttpLimits, LimitedHttpProtocol
from tandem.wire.tls import TlsFiles

_SEND_BYTES = 256 << 10
"""Size of a connection's send buffer in the kernel; without a limit it grows to megabytes for a client that does not
read."""


class _EmbeddedServer(uvicorn.Server):
    """uvicorn server that installs no signal handlers, because `main` handles Ctrl-C and SIGTERM, and that ends a
    connection whose TLS handshake takes longer than `handshake_s` seconds."""

    def __init__(self, config: uvicorn.Config, handshake_s: float) -> None:
        super().__init__(config)
        self._handshake_s = handshake_s
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and listen on `sockets` with a limit of the handshake, for which uvicorn has no
        option."""
        await super().startup([])
        protocol = partial(  # type: ignore[call-arg]  # uvicorn declares it as any protocol
            self.config.http_protocol_class,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        context = self.config.ssl
        self.servers = [
            await asyncio.get_running_loop().create_server(
                protocol,
                sock=listener,
                ssl=context,
                backlog=self.config.backlog,
                ssl_handshake_timeout=None if context is None else self._handshake_s,
            )
            for listener in sockets or ()
        ]
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """Serve an ASGI application with uvicorn on one listening socket.

    Under uvloop it handles 2.5 times as many requests per second as under asyncio's own loop.
    """

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        *,
        graceful_s: float = 20.0,
        limits: HttpLimits | None = None,
        tls: TlsFiles | None = None,
        on_refusal: Callable[[TandemError], None] | None = None,
    ) -> None:
        """Bind the socket, so that the attribute `port`, the bound port, is known before `start`. Raises OSError for a
        port in use.

        `port`: port to bind; 0: any free one. `graceful_s`: seconds that `stop` waits for responses in progress. `tls`:
        serve HTTPS with these files. `on_refusal`: called with each error that the server sends itself, because a
        request exceeds `limits` or is not valid HTTP."""
        limits = limits or HttpLimits()
        if tls is not None and tls.requires_client:
            limits = replace(limits, requires_certificate=True)
        self._socket = _bind(host, port)
        _watch_peers(self._socket, limits.stalled_client_s)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=partial(LimitedHttpProtocol, limits, on_refusal),  # type: ignore[arg-type]  # a class or what makes one of its kind
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,  # nothing uses the client's address
            timeout_keep_alive=round(limits.keep_alive_s),
            timeout_graceful_shutdown=max(1, round(graceful_s)),
            ssl_context_factory=None if tls is None else lambda _config, _default: tls.server_context(),
        )
        self._server = _EmbeddedServer(config, limits.handshake_s)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve in a background task of the running loop; the server accepts connections when this returns. Raises the
        server's own error, or RuntimeError, where the server ends while it starts."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait({self._task, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._task.done():
            self._task.result()
            raise RuntimeError("the HTTP server ended while it started")

    async def stop(self) -> None:
        """Stop the server: accept no new connections, wait up to `graceful_s` seconds for the responses in progress,
        and abort the remaining ones. Before `start` this only closes the socket."""
        self._server.should_exit = True
        if self._task is None:
            self._socket.close()
            return
        await self._task


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _watch_peers(listener: socket.socket, silence_s: float) -> None:
    """Set TCP options that accepted connections inherit: the kernel closes a connection whose peer is dead or reads
    nothing after `silence_s`, and buffers at most `_SEND_BYTES` of a response."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(silence_s)))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, round(silence_s * 1e3)))
