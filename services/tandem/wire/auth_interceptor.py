"""Lets the calls of strangers no further than gRPC's door; never reads a message of one, and tells it nothing."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from tandem.core.ids import Incarnation
from tandem.wire.call_auth import AuthFailure, CallCheck, headers_of
from tandem.wire.secret_file import SecretFile

LOG_S = 60.0
"""Between two log lines about calls that are refused for one reason."""
OTHER_LIFE = "this is another life of the worker"

_log = logging.getLogger(__name__)


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # which it takes in the stubs only
    """On the event loop. `wall` gives seconds since the epoch.

    Who knows the secret and means another life of the worker is told so, with FAILED_PRECONDITION: that is how a member
    learns of a restart. Everybody else gets UNAUTHENTICATED.
    """

    def __init__(self, incarnation: Incarnation, secret: SecretFile, wall: Callable[[], float]) -> None:
        self._check = CallCheck(incarnation)
        self._secret = secret
        self._wall = wall
        self._told: dict[AuthFailure, tuple[float, int]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        call, now = handler_call_details, self._wall()
        headers = headers_of(call.invocation_metadata)
        fault = self._check.judge(headers, call.method, self._secret.current(now), now)
        if fault is AuthFailure.WRONG and self._secret.look():
            fault = self._check.judge(headers, call.method, self._secret.current(now), now)
        if fault is None:
            return await continuation(call)
        return self._refusal(fault)

    def _refusal(self, fault: AuthFailure) -> grpc.RpcMethodHandler[Any, Any]:
        """As a stream whatever the method is: gRPC reads the message of any other call before it is refused."""

        async def refuse(_requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._tell(fault, context.peer())
            if fault is AuthFailure.OTHER_LIFE:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, OTHER_LIFE)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _tell(self, fault: AuthFailure, peer: str) -> None:
        """A line for the first call refused for a reason, and one per minute that has more."""
        now = self._wall()
        last, num_silent = self._told.get(fault, (None, 0))
        if last is not None and 0 <= now - last < LOG_S:
            self._told[fault] = (last, num_silent + 1)
            return
        self._told[fault] = (now, 0)
        more = f" ({num_silent} more since the last such line)" if num_silent else ""
        _log.warning("a call from %s is refused: %s%s", peer, fault.value, more)
