"""Answers grpc.health.v1 from the dispatch's readiness; never decides it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.gateway.context.interfaces import RequestDispatcher

LIVE = "live"
"""A service name for whoever restarts the process, as `/live` is over HTTP: it serves while it answers."""
LOOK_S = 0.25
"""Between two looks at the readiness for those who watch."""

_Reply = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # generated without types
    """`services` follow readiness, and so does "", the server as a whole."""

    def __init__(self, dispatch: RequestDispatcher, services: tuple[str, ...]) -> None:
        self._dispatch = dispatch
        self._services = frozenset({"", *services})
        self._closing = asyncio.Event()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        status = self._status(request.service)
        if status == _Reply.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service[:100]!r}")
        return _Reply(status=status)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """The status at once and after each change; ends when the server stops."""
        told = None
        while True:
            status = self._status(request.service)
            if status != told:
                await context.write(_Reply(status=status))
                told = status
            if self._closing.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._closing.wait()

    def close(self) -> None:
        """Let those who watch go: a server that stops waits for them."""
        self._closing.set()

    def _status(self, service: str) -> int:
        if service == LIVE:
            return int(_Reply.SERVING)
        if service not in self._services:
            return int(_Reply.SERVICE_UNKNOWN)
        ready = self._dispatch.ready() is None and not self._closing.is_set()
        return int(_Reply.SERVING if ready else _Reply.NOT_SERVING)
