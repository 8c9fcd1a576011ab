"""Map a TandemError to the gRPC status code that ends a call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from tandem.core.errors import TandemError


@asynccontextmanager
async def abort_on_error(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """End a call by the TandemError that the block raises, with the status code of its kind from `core.errors`."""
    try:
        yield
    except TandemError as error:
        await context.abort(grpc.StatusCode[error.kind.grpc], error.message)
