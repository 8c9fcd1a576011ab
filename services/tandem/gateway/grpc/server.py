"""Run the gateway's gRPC services, with health and reflection, on one port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.interfaces import Authenticator, RequestDispatcher
from tandem.gateway.grpc.call import GrpcCall
from tandem.gateway.grpc.health import HealthService
from tandem.gateway.grpc.service import SERVICE, Context, InferenceService
from tandem.gateway.serving.completions import CompletionService
from tandem.gateway.tenants.authenticator import api_keys
from tandem.wire.gen.inference_pb2_grpc import add_InferenceServicer_to_server
from tandem.wire.tls import TlsFiles

_Servicer: Any = reflection.aio.ReflectionServicer  # type: ignore[attr-defined] # unknown to the stubs


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

        async def read_and_serve(data: bytes, context: Context) -> Any:
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


class ReflectionService(_Servicer):  # type: ignore[misc]
    """Serve grpc.reflection.v1alpha for `services` (full service names) to the clients whose API key `authenticator`
    accepts."""

    def __init__(self, services: Sequence[str], authenticator: Authenticator) -> None:
        super().__init__(services)
        self._authenticator = authenticator

    async def ServerReflectionInfo(self, requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        call = GrpcCall(context)
        try:
            self._authenticator.identify(api_keys(call.entries))
        except TandemError as error:
            await call.abort(error)
        async for reply in super().ServerReflectionInfo(requests, context):
            yield reply


class GrpcServer:
    """Serve the gateway's gRPC services, with health and reflection, on one port. Construct it inside the event loop
    that is to serve. All calls but those of health need a key where `authenticator` requires one. `port`: the bound
    port; 0 before `start`."""

    def __init__(
        self,
        dispatch: RequestDispatcher,
        answers: CompletionService,
        authenticator: Authenticator,
        *,
        max_message: int = 4 << 20,
        max_calls: int = 4096,
        stalled_client_s: float = 60.0,
        tls: TlsFiles | None = None,
    ) -> None:
        """Configure the server.

        `max_message`: largest request in bytes. gRPC itself refuses a larger one with RESOURCE_EXHAUSTED, without an
        ErrorDetail. `max_calls`: largest number of concurrent calls, without those of health and reflection; further
        calls are refused. A client can have at most 16 more than `max_calls` calls open over one connection; it holds
        back any others itself. `stalled_client_s`: a stream ends when its client reads nothing for this many seconds.
        `tls`: serve TLS with these files."""
        self._health = HealthService(dispatch, (SERVICE,))
        self._server = grpc.aio.server(interceptors=[MessageCheck()], options=_options(max_message, max_calls))
        self.port = 0
        self._tls = tls
        service = InferenceService(answers, authenticator, max_calls, stalled_client_s)
        add_InferenceServicer_to_server(service, self._server)
        add_HealthServicer_to_server(self._health, self._server)
        services = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        add_ServerReflectionServicer_to_server(ReflectionService(services, authenticator), self._server)

    async def start(self, host: str, port: int) -> None:
        """Bind the port (0: any free one) and serve; the server accepts calls when this returns. Raises
        TandemError(INVALID_REQUEST) for a port in use."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, self._tls.server_credentials())
        except RuntimeError as error:
            message = f"cannot listen on {host}:{port}: {error}; choose another --grpc-port"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="gateway.grpc_port") from error
        await self._server.start()

    async def stop(self, graceful_s: float) -> None:
        """Refuse new calls with UNAVAILABLE, end open `Watch` calls, wait up to `graceful_s` seconds for the other
        ones, and abort those that are still open."""
        self._health.close()
        await self._server.stop(graceful_s)


def _options(max_message: int, max_calls: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message),
        # 16 more than the calls, for health probes over the same connection.
        ("grpc.max_concurrent_streams", max_calls + 16),
        # Pings detect a client whose connection is dead within 30 s, and its requests end.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Load balancers ping often, with or without open calls.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        # Two servers on one port would each get half of the calls; the second must fail to bind.
        ("grpc.so_reuseport", 0),
    ]
