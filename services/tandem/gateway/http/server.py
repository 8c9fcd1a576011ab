"""Runs an ASGI application under uvicorn inside a loop that somebody else owns; never handles a signal."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from functools import partial
from typing import Any

import uvicorn

from tandem.gateway.http.protocol_limits import HttpLimits, LimitedHttpProtocol

_SEND_BYTES = 256 << 10
"""Of one connection, in the kernel; left alone it grows to megabytes for a client that does not read."""


class _EmbeddedServer(uvicorn.Server):
    """Leaves the process's signals alone, because whoever composes the program decides what Ctrl-C means."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """One listening socket and what serves it. Use uvloop for the loop: it is worth 2.5 times the requests."""

    __slots__ = ("_server", "_socket", "_task", "port")

    def __init__(
        self, app: Any, host: str, port: int, *, graceful_s: float = 20.0, limits: HttpLimits | None = None
    ) -> None:
        """Binds at once, so that `port` (0: any free one) is known and a taken one raises OSError here.

        `graceful_s` is how long `stop` waits for responses under way.
        """
        limits = limits or HttpLimits()
        self._socket = _bind(host, port)
        _watch_peers(self._socket, limits.stalled_client_s)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=partial(LimitedHttpProtocol, limits),  # type: ignore[arg-type]  # a class or what makes one of its kind
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,  # nobody asks who is behind a proxy
            timeout_keep_alive=round(limits.keep_alive_s),
            timeout_graceful_shutdown=max(1, round(graceful_s)),
        )
        self._server = _EmbeddedServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve in the background of the running loop; accepts connections when this returns."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait({self._task, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._task.done():
            self._task.result()
            raise RuntimeError("the HTTP server ended while it started")

    async def wait(self) -> None:
        """Until the server ends, which it does only by `stop`; raises what broke it."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Take no new connections, let the responses under way end, cut those that take longer than `graceful_s`."""
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
    """Connections inherit it: a peer that is gone without a word, or takes nothing, is found out by the kernel after
    `silence_s`, and one response holds no more of its memory than `_SEND_BYTES`."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(silence_s)))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, round(silence_s * 1e3)))
