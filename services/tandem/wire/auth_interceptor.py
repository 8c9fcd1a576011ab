"""Reject unauthenticated gRPC calls before any of their messages is read."""

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
"""Minimum seconds between two log lines about calls that are refused for the same reason."""
OTHER_LIFE = "this is another life of the worker"
"""gRPC error details of a call that is meant for another incarnation of the worker; peers compare this text."""

_log = logging.getLogger(__name__)


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # which it takes in the stubs only
    """Check the signature of each gRPC call to one incarnation of a worker, and abort calls that fail the check.

    A call signed with the cluster's `secret` but meant for another incarnation gets FAILED_PRECONDITION with the
    details `OTHER_LIFE`, from which the sender learns of a restart; every other refused call gets UNAUTHENTICATED.
    Refusals are logged. `wall` returns seconds since the epoch. Used on the event loop.
    """

    def __init__(self, incarnation: Incarnation, secret: SecretFile, wall: Callable[[], float]) -> None:
        self._check = CallCheck(incarnation)
        self._secret = secret
        self._wall = wall
        # Failure -> (time of its last log line, calls refused for it since without a line).
        self._logged: dict[AuthFailure, tuple[float, int]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of a call if the call's signature is valid. Otherwise return a handler that aborts the
        call before any of its messages is read."""
        call, now = handler_call_details, self._wall()
        headers = headers_of(call.invocation_metadata)
        fault = self._check.judge(headers, call.method, self._secret.current(now), now)
        if fault is AuthFailure.WRONG and self._secret.look():
            fault = self._check.judge(headers, call.method, self._secret.current(now), now)
        if fault is None:
            return await continuation(call)
        return self._refusal(fault)

    def _refusal(self, fault: AuthFailure) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that aborts the call.

        The handler is a streaming one for every method: gRPC would read the message of a unary call before the abort.
        """

        async def refuse(_requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._log_refusal(fault, context.peer())
            if fault is AuthFailure.OTHER_LIFE:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, OTHER_LIFE)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _log_refusal(self, fault: AuthFailure, peer: str) -> None:
        """Log the first call that is refused for a reason, then at most one line per `LOG_S` for that reason."""
        now = self._wall()
        last, num_unlogged = self._logged.get(fault, (None, 0))
        if last is not None and 0 <= now - last < LOG_S:
            self._logged[fault] = (last, num_unlogged + 1)
            return
        self._logged[fault] = (now, 0)
        more = f" ({num_unlogged} further calls since the last such line)" if num_unlogged else ""
        _log.warning("a call from %s is refused: %s%s", peer, fault.value, more)
