"""Compute the address that a worker advertises; refuse an address that others can reach without authentication."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

from tandem.core.addresses import format_host, is_loopback, is_wildcard
from tandem.core.config import Config, WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.wire.peer_auth import PeerAuth

POD_IP = "POD_IP"
"""Environment variable with the pod's address, set by the chart's pod template (Kubernetes downward API)."""

_DOCUMENTATION_ADDRESSES = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses reserved for documentation (RFC 5737, RFC 3849): the route to them is the default route."""


def advertised_address(
    config: WorkerConfig, port: int, environ: Mapping[str, str], default_address: Callable[[str], str]
) -> str:
    """Return the host:port to advertise for a worker that listens at `port`.

    `worker.advertise_address` wins if set (its port 0 stands for `port`), then `worker.host`. If that is a wildcard,
    the pod's address is used, which `environ` has under POD_IP, else what `default_address` returns for the wildcard:
    an address of this machine.
    """
    if config.advertise_address:
        host, _, advertised_port = config.advertise_address.rpartition(":")
        return f"{host}:{int(advertised_port) or port}"
    host = config.host
    if is_wildcard(host):
        host = environ.get(POD_IP) or default_address(host)
    return f"{format_host(host)}:{port}"


def own_host(config: WorkerConfig) -> str:
    """Return the host name or address at which other machines reach this one: that of the address which a worker with
    these settings advertises. Raises TandemError(INVALID_REQUEST) as `default_route_address`."""
    address = advertised_address(config, 0, os.environ, default_route_address)
    return address.rpartition(":")[0].strip("[]")


def default_route_address(wildcard: str) -> str:
    """Return this machine's address on its default route, of the address family of `wildcard` ("0.0.0.0" or "::") if
    there is one, else of the other family. Sends no packet.

    Raises TandemError(INVALID_REQUEST) where there is no default route.
    """
    first = socket.AF_INET6 if ":" in wildcard else socket.AF_INET
    for family in sorted(_DOCUMENTATION_ADDRESSES, key=lambda candidate: candidate is not first):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((_DOCUMENTATION_ADDRESSES[family], 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    message = f"worker.host is {wildcard}, but this machine has no default route: set --advertise-address HOST:PORT"
    raise TandemError(ErrorKind.INVALID_REQUEST, message, param="worker.advertise_address")


def require_worker_auth(config: Config, worker_name: str = "") -> PeerAuth:
    """Return the authentication that the worker uses with other members of its cluster.

    Raises TandemError(INVALID_REQUEST), naming the remedies, when others can reach the worker's address and nothing
    authenticates them.
    """
    trust = PeerAuth.of(worker_name, config.cluster)
    if trust.is_open and not config.cluster.insecure and not is_loopback(config.worker.host):
        message = (
            f"worker.host {config.worker.host} can be reached from other machines: set --secret-file to a secret that "
            "all gateways and workers share, or the three TLS files, or allow anybody with --cluster-insecure"
        )
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="cluster.secret_file")
    return trust
