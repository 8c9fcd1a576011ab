"""Check before a gateway is started that its ports are free, that its TLS files can be used, and that others cannot use
it without API keys by accident.

A gateway without keys must listen on loopback only, unless `gateway.auth=off` is set explicitly.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NamedTuple

from tandem.core.addresses import is_loopback, is_wildcard
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import DEFAULT_LAYER, Resolved
from tandem.gateway.tenants.tenants_watch import read_tenants
from tandem.wire.tls import TlsFiles


class _Place(NamedTuple):
    """Address at which a gateway is to listen, with the setting (`name`) and the flag of its port."""

    name: str
    flag: str
    host: str
    port: int

    def overlaps(self, other: _Place) -> bool:
        """Return whether both would listen at one port of one address. The host `::` stands for every address, and
        `0.0.0.0` for every IPv4 address."""
        has_address = self.host == other.host or self._covers(other.host) or other._covers(self.host)
        return has_address and self.port == other.port != 0

    def _covers(self, host: str) -> bool:
        """Return whether this host is a wildcard that includes `host`."""
        return is_wildcard(self.host) and (":" in self.host or ":" not in host)


def require_free_port(config: GatewayConfig) -> None:
    """Check that the gateway's ports differ and can be bound; raises TandemError(INVALID_REQUEST) if not."""
    places = [
        _Place("port", "--port", config.host, config.port),
        _Place("grpc_port", "--grpc-port", config.host, config.own_grpc_port),
        _Place("metrics_port", "--gateway-metrics-port", config.own_metrics_host, config.metrics_port),
    ]
    for number, place in enumerate(places):
        # Two listeners that share a port would each get some of its connections.
        for other in places[:number]:
            if place.overlaps(other):
                message = f"gateway.{place.name} {place.port} is that of gateway.{other.name} too"
                message += f": choose another {place.flag}"
                raise TandemError(ErrorKind.INVALID_REQUEST, message, param=f"gateway.{place.name}")
        if place.port >= 0:
            _require(place.host, place.port, place.name, place.flag)


def _require(host: str, port: int, name: str, flag: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            message = f"cannot listen on {host}:{port}: {error.strerror}; choose another {flag}"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param=f"gateway.{name}") from error


def require_tls_files(config: GatewayConfig) -> None:
    """Check that the TLS files of the gateway's listeners can be used; raises TandemError(INVALID_REQUEST) if not."""
    if config.has_tls:
        TlsFiles.of_gateway(config)


def require_auth_if_public(resolved: Resolved) -> None:
    """Check the authentication settings of a gateway before anything is started.

    Raises TandemError(INVALID_REQUEST) that names the flags to set, for an unreadable tenants file, contradictory
    settings, or a host that others can reach while `gateway.auth` is not set."""
    config = resolved.config.gateway
    if config.auth == "keys":
        if not config.tenants:
            message = (
                "gateway.auth=keys needs a file of tenants and their keys: set --tenants FILE, or serve everybody with "
                "--auth off"
            )
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="gateway.tenants")
        read_tenants(Path(config.tenants), config.disaggregation)
        return
    if config.tenants:
        message = "gateway.tenants is set, but gateway.auth=off requires no keys: add --auth keys, or remove --tenants"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="gateway.auth")
    if resolved.origins["gateway.auth"] == DEFAULT_LAYER and not is_loopback(config.host):
        message = (
            f"gateway.host {config.host} can be reached from other machines: require API keys with --auth keys "
            "--tenants FILE, or serve everybody with --auth off"
        )
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="gateway.auth")
