"""The address that workers tell others, and where it leads; never tells it to anybody.

Which address that is, is the workers' own rule and comes from outside.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.core.addresses import is_loopback
from tandem.core.config import WorkerConfig
from tandem.core.errors import TandemError
from tandem.doctor.finding import Finding, fail, ok, warn

Told = Callable[[WorkerConfig, Mapping[str, str]], str]
"""(settings, environment) -> host:port that is told. Raises TandemError where none can be."""


@dataclass(frozen=True, slots=True)
class AdvertisedAddress:
    """`address` is host:port; `problem`: why there is none, else empty. `leads_to` are the addresses of its host,
    `is_here` that one of them is this machine's."""

    address: str = ""
    problem: str = ""
    leads_to: tuple[str, ...] = ()
    is_here: bool = False


def read_announced(worker: WorkerConfig, environ: Mapping[str, str], told: Told) -> AdvertisedAddress:
    try:
        address = told(worker, environ)
    except TandemError as error:
        return AdvertisedAddress(problem=error.message)
    try:
        found = socket.getaddrinfo(address.rpartition(":")[0].strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return AdvertisedAddress(address)
    leads_to = tuple(dict.fromkeys(str(where[0]) for *_, where in found))
    return AdvertisedAddress(address, "", leads_to, any(map(_is_local, leads_to)))


def judge_announced(announced: AdvertisedAddress, host: str) -> Finding:
    """`host` is where workers listen."""
    if announced.problem:
        fix = "worker.advertise_address=HOST:0 at which others reach this machine; in a pod POD_IP by the downward API"
        return fail("advertise-address", announced.problem, fix)
    told = f"workers are announced at {announced.address.removesuffix(':0')}"
    if not announced.leads_to:
        fix = (
            "worker.advertise_address of a name that the other machines' DNS knows, or of an IP address of this machine"
        )
        return fail("advertise-address", f"{told}, which cannot be resolved", fix)
    if is_loopback(announced.leads_to[0]) and not is_loopback(host):
        fix = "worker.advertise_address=HOST:0 of the address at which other machines reach this one (`hostname -I`)"
        return warn("advertise-address", f"{told}, a loopback: others reach themselves there", fix)
    if announced.is_here:
        return ok("advertise-address", f"{told}, which is here")
    return ok(
        "advertise-address", f"{told} ({', '.join(announced.leads_to)}), which passes on to here if it is a proxy"
    )


def _is_local(address: str) -> bool:
    """Only addresses of this machine can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
