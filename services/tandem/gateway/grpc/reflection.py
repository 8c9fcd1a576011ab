"""Serve gRPC's reflection, by which tools list the services, to clients with a key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
from grpc_reflection.v1alpha import reflection

from tandem.core.errors import TandemError
from tandem.gateway.context.interfaces import Authenticator
from tandem.gateway.grpc.call import GrpcCall
from tandem.gateway.tenants.authenticator import api_keys

_Servicer: Any = reflection.aio.ReflectionServicer  # type: ignore[attr-defined] # unknown to the stubs


class ReflectionService(_Servicer):  # type: ignore[misc]
    """Serve grpc.reflection.v1alpha for `services` (full service names) to the clients whose API key `authenticator`
    accepts."""

    def __init__(self, services: Sequence[str], authenticator: Authenticator) -> None:
        super().__init__(services)
        self._authenticator = authenticator

    async def ServerReflectionInfo(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        call = GrpcCall(context)
        try:
            self._authenticator.identify(api_keys(call.entries))
        except TandemError as error:
            await call.abort(error)
        async for reply in super().ServerReflectionInfo(requests, context):
            yield reply
