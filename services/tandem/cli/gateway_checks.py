"""List the ports of a gateway, and check before it is started that its TLS files can be used and that others cannot use
it without API keys by accident.

A gateway without keys must listen on loopback only, unless `gateway.auth=off` is set explicitly.
"""

from __future__ import annotations

from pathlib import Path

from tandem.cli.ports import PortSetting
from tandem.core.addresses import is_loopback
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import DEFAULT_LAYER, Resolved
from tandem.gateway.tenants.tenants_watch import read_tenants
from tandem.wire.tls import TlsFiles


def gateway_ports(config: GatewayConfig) -> list[PortSetting]:
    """Return the ports on which a gateway listens."""
    host_name, host = "gateway.host", config.host
    metrics_host_name = "gateway.metrics_host" if config.metrics_host else host_name
    metrics = (metrics_host_name, config.own_metrics_host, config.metrics_port)
    return [
        PortSetting("gateway.port", "--port", host_name, host, config.port),
        PortSetting("gateway.grpc_port", "--grpc-port", host_name, host, config.own_grpc_port),
        PortSetting("gateway.metrics_port", "--gateway-metrics-port", *metrics),
    ]


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
