"""At which address others are told to reach a worker; never listens and never asks anybody."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from tandem.core.addresses import is_wildcard
from tandem.core.config import WorkerConfig
from tandem.core.errors import ErrorKind, TandemError

POD_IP = "POD_IP"
"""The variable in which Kubernetes tells a pod its address, where its template asks for that."""

_BEYOND = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses of nobody, kept for documentation (RFC 5737, RFC 3849): what is on the way to them is on the way out."""


def advertised_address(config: WorkerConfig, port: int, environ: Mapping[str, str], own: Callable[[str], str]) -> str:
    """The host:port to advertise for a worker that listens at `port`.

    `worker.advertise_address` where it is set, its port 0 standing for `port`; else `worker.host`; where that means
    every address the pod's, or what `own` returns for it: an address of this machine."""
    if config.advertise_address:
        host, _, announced = config.advertise_address.rpartition(":")
        return f"{host}:{int(announced) or port}"
    host = config.host
    if is_wildcard(host):
        host = environ.get(POD_IP) or own(host)
    return f"{format_host(host)}:{port}"


def format_host(host: str) -> str:
    """As a port can follow it."""
    return f"[{host}]" if ":" in host else host


def default_route_address(wildcard: str) -> str:
    """From which this machine would send beyond its own network; of the wildcard's family, else of the other. Sends
    nothing. Raises TandemError(INVALID_REQUEST) where there is no way out."""
    first = socket.AF_INET6 if ":" in wildcard else socket.AF_INET
    for family in sorted(_BEYOND, key=lambda one: one is not first):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as way:
                way.connect((_BEYOND[family], 9))
                return str(way.getsockname()[0])
        except OSError:
            continue
    message = f"worker.host is {wildcard} and this machine has no address to advertise: set worker.advertise_address"
    raise TandemError(ErrorKind.INVALID_REQUEST, message, param="worker.advertise_address")
