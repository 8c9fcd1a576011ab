"""How a TandemError ends a call; never ends one."""

from __future__ import annotations

import grpc

from tandem.core.errors import TandemError


def status_of(error: TandemError) -> grpc.StatusCode:
    """By the table of errors."""
    return grpc.StatusCode[error.facts.grpc]
