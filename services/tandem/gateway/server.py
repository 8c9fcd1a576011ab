"""Runs an ASGI application under uvicorn inside a loop that somebody else owns; never handles a signal."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any

import uvicorn


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

    def __init__(self, app: Any, host: str, port: int, *, graceful_s: float = 20.0) -> None:
        """Binds at once, so that `port` (0: any free one) is known and a taken one raises OSError here.

        `graceful_s` is how long `stop` waits for responses under way.
        """
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=75,
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
