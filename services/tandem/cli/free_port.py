"""Check that the gateway's ports are free before anything is started."""

from __future__ import annotations

import socket

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError


def require_free_port(config: GatewayConfig) -> None:
    """Raise TandemError(INVALID_REQUEST) if the gateway's HTTP or gRPC port cannot be bound."""
    _require(config.host, config.port, "port")
    _require(config.host, config.own_grpc_port, "grpc_port")


def _require(host: str, port: int, name: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            message = f"cannot listen on {host}:{port}: {error.strerror}; choose another --{name.replace('_', '-')}"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param=f"gateway.{name}") from error
