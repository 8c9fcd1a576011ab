"""Looks whether the gateway's ports can be had; never keeps one."""

from __future__ import annotations

import socket

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError


def require_free_port(config: GatewayConfig) -> None:
    """Refuse a port that is taken before anything is started. Raises TandemError."""
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
