"""Check whether other machines can use the address that workers of this machine advertise.

The caller passes the workers' own rule for choosing the address.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from tandem.core.addresses import is_loopback
from tandem.core.config import WorkerConfig
from tandem.core.errors import TandemError
from tandem.doctor.finding import Finding, fail, ok, warn

AddressRule = Callable[[WorkerConfig, Mapping[str, str]], str]
"""Signature of a rule: `rule(settings, environment)` returns the host:port to advertise, and raises TandemError if
there is none."""


def check_advertised(worker: WorkerConfig, environ: Mapping[str, str], rule: AddressRule) -> Finding:
    """Return a finding on whether other machines can use the address that a worker with the settings `worker` would
    advertise.

    `environ`: environment variables. `rule`: computes that address as a worker does. Resolves the host name in the
    address, which may block."""
    try:
        address = rule(worker, environ)
    except TandemError as error:
        fix = (
            "set worker.advertise_address=HOST:0 with a HOST that others reach; in a pod set POD_IP by the downward API"
        )
        return fail("advertise-address", error.message, fix)
    summary = f"workers are advertised at {address.removesuffix(':0')}"
    try:
        found = socket.getaddrinfo(address.rpartition(":")[0].strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        fix = (
            "set worker.advertise_address to a name that the other machines' DNS knows, or to an IP address of this "
            "machine"
        )
        return fail("advertise-address", f"{summary}, which cannot be resolved: nobody can reach them", fix)
    leads_to = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
    if is_loopback(leads_to[0]) and not is_loopback(worker.host):
        fix = "set worker.advertise_address=HOST:0 at which other machines reach this one (`hostname -I`)"
        return warn("advertise-address", f"{summary}, a loopback address: other machines would reach themselves", fix)
    if any(map(_is_local, leads_to)):
        return ok("advertise-address", f"{summary}, which is on this machine")
    return ok("advertise-address", f"{summary} ({', '.join(leads_to)}), which must forward to this machine")


def _is_local(address: str) -> bool:
    """Check whether an IP address belongs to this machine, by binding it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
