"""Map a TandemError to the gRPC status code that ends a call."""

from __future__ import annotations

import grpc

from tandem.core.errors import TandemError


def status_of(error: TandemError) -> grpc.StatusCode:
    """Return the gRPC status code of the error's kind, from the table in `core.errors`."""
    return grpc.StatusCode[error.facts.grpc]
