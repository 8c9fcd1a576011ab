"""Looks whether the gateway's port can be had; never keeps it."""

from __future__ import annotations

import socket

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError


def require_free_port(config: GatewayConfig) -> None:
    """Refuse a port that is taken before anything is started. Raises TandemError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            message = f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another --port"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="gateway.port") from error
