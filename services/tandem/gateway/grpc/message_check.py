"""Refuse gRPC calls whose message is malformed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.grpc.call import GrpcCall


class MessageCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # which it takes in the stubs only
    """End a call with one message with INVALID_ARGUMENT where the bytes are not that message. gRPC itself would answer
    UNKNOWN and log a traceback for each such call, also of clients without a key."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the method's handler, which reads its message inside; that of a stream of messages unchanged."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler  # type: ignore[no-any-return]
        serve = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def read_and_serve(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                request = handler.request_deserializer(data)
            except DecodeError:
                reason = f"the message is not one of {handler_call_details.method}"
                return await GrpcCall(context).abort(TandemError(ErrorKind.INVALID_REQUEST, reason))
            return await serve(request, context)

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(read_and_serve, response_serializer=handler.response_serializer)
