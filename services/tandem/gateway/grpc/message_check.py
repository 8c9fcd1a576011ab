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
    """Refuse a call with INVALID_ARGUMENT where the bytes of its single request message cannot be decoded. Without this
    interceptor gRPC would answer UNKNOWN and log a traceback for each such call, even for clients without a key."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that decodes the request message itself, ends the call where that fails, and otherwise calls
        the method's own handler.

        For a method that receives a stream of messages the method's own handler is returned, and for an unknown method
        None."""
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
