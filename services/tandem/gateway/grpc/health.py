"""Serve grpc.health.v1, the health protocol of gRPC, with the readiness of the dispatcher as status."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.gateway.context.interfaces import RequestDispatcher

LIVE = "live"
"""Service name for liveness probes, as `/live` is over HTTP; its status is always SERVING."""
LOOK_S = 0.25
"""Seconds between two checks of the readiness for an open `Watch` call."""

_Reply = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # generated without types
    """Serve grpc.health.v1. Each name in `services`, and "" for the whole server, is SERVING while the dispatcher is
    ready and NOT_SERVING otherwise. The name LIVE is always SERVING."""

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
        """Send the status of the requested service when the call begins and after each change; for an unknown name it
        is SERVICE_UNKNOWN. The call ends when `close` is called."""
        sent = None
        while True:
            is_closing = self._closing.is_set()  # before the status, which may change while it is sent
            status = self._status(request.service)
            if status != sent:
                await context.write(_Reply(status=status))
                sent = status
            if is_closing:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._closing.wait()

    def close(self) -> None:
        """Report the services as NOT_SERVING from now on, and end all `Watch` calls, because a stopping server would
        wait for them."""
        self._closing.set()

    def _status(self, service: str) -> int:
        if service == LIVE:
            return int(_Reply.SERVING)
        if service not in self._services:
            return int(_Reply.SERVICE_UNKNOWN)
        ready = self._dispatch.ready() is None and not self._closing.is_set()
        return int(_Reply.SERVING if ready else _Reply.NOT_SERVING)
