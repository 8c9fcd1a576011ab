"""Compute the address that a worker advertises; refuse an address that others can reach without authentication."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

from tandem.core.addresses import format_host, host_of, is_loopback, is_wildcard
from tandem.core.config import Config, WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.wire.peer_auth import PeerAuth

POD_IP = "POD_IP"
"""Environment variable with the pod's address, set by the chart's pod template (Kubernetes downward API)."""

_DOCUMENTATION_ADDRESSES = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""By address family, an address that is reserved for documentation (RFC 5737, RFC 3849), so that the route to it is the
default route."""


def advertised_address(
    config: WorkerConfig, port: int, environ: Mapping[str, str], default_address: Callable[[str], str]
) -> str:
    """Return the address, host:port, at which others reach a worker that listens at `port`.

    The host is the first of these that is available: the host of `worker.advertise_address`; `worker.host` if it is not
    a wildcard; the pod's address, which is the value of POD_IP in `environ`; and `default_address(worker.host)`, an
    address of this machine. The port is `port`, unless `worker.advertise_address` names a port other than 0.
    """
    if config.advertise_address:
        host, _, advertised_port = config.advertise_address.rpartition(":")
        return f"{host}:{int(advertised_port) or port}"
    host = config.host
    if is_wildcard(host):
        host = environ.get(POD_IP) or default_address(host)
    return f"{format_host(host)}:{port}"


def own_host(config: WorkerConfig) -> str:
    """Return the host name or address at which other machines reach this one. It is the host of the address that a
    worker with the settings `config` advertises. Raises TandemError(INVALID_REQUEST) if the host must be taken from the
    default route and there is none."""
    return host_of(advertised_address(config, 0, os.environ, default_route_address))


def default_route_address(wildcard: str) -> str:
    """Return this machine's address on its default route: in the address family of `wildcard` ("0.0.0.0" or "::") if
    that family has a default route, else in the other family. Sends no packet.

    Raises TandemError(INVALID_REQUEST) where neither family has a default route.
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
    """Return the authentication that a worker with the settings `config` uses with other members of its cluster.
    `worker_name`: name of the worker in the logs of other programs.

    Raises TandemError(INVALID_REQUEST), whose message names the remedies, if other machines can reach the worker's
    address although neither a secret nor TLS is configured and `cluster.insecure` is off.
    """
    trust = PeerAuth.of(worker_name, config.cluster)
    if trust.is_open and not config.cluster.insecure and not is_loopback(config.worker.host):
        message = (
            f"worker.host {config.worker.host} can be reached from other machines: set --secret-file to a secret that "
            "all gateways and workers share, or the three TLS files, or allow anybody with --cluster-insecure"
        )
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="cluster.secret_file")
    return trust
