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
    """Run the block of an `async with`, and if it raises TandemError, end the gRPC call of `context` with the status
    code of the error's kind and its message. Other exceptions pass through."""
    try:
        yield
    except TandemError as error:
        await context.abort(grpc.StatusCode[error.kind.grpc], error.message)
