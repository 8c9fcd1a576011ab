"""The address that workers tell others, and where it leads; never tells it to anybody."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from tandem.core.config import WorkerConfig
from tandem.core.hosts import is_loopback
from tandem.doctor.finding import Finding, fail, ok, skip, warn
from tandem.doctor.system import System

WILDCARDS = ("0.0.0.0", "::")
POD_IP = "POD_IP"
"""The variable of the downward API that a worker tells where it listens at every address."""


@dataclass(frozen=True, slots=True)
class Announced:
    """`told` as settings or the environment have it, empty where nothing says it. `addresses` are those of its host,
    `is_here` that one of them is this machine's."""

    told: str
    addresses: tuple[str, ...] = ()
    is_here: bool = False


def read_announced(worker: WorkerConfig, system: System) -> Announced:
    pod_ip = system.environ.get(POD_IP, "") if worker.host in WILDCARDS else ""
    told = worker.announce or pod_ip
    host = worker.announce.rpartition(":")[0].strip("[]") or pod_ip
    if not told:
        return Announced("")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return Announced(told)
    addresses = tuple(dict.fromkeys(str(address[0]) for *_, address in found))
    return Announced(told, addresses, any(map(_is_local, addresses)))


def judge_announced(announced: Announced, host: str) -> Finding:
    """`host` is where workers listen."""
    is_wildcard = host in WILDCARDS
    if not announced.told:
        return _silent(host, is_wildcard=is_wildcard)
    if not announced.addresses:
        fix = "worker.announce of a name that the other machines' DNS knows, or of an IP address of this machine"
        return fail("announce", f"workers are announced at {announced.told}, which cannot be resolved", fix)
    told = f"workers are announced at {announced.told}"
    if is_loopback(announced.addresses[0]) and not is_loopback(host):
        fix = "worker.announce of the address at which other machines reach this one (`hostname -I`)"
        return warn("announce", f"{told}, a loopback: others reach themselves there", fix)
    if announced.is_here:
        return ok("announce", f"{told}, which is here")
    return ok("announce", f"{told} ({', '.join(announced.addresses)}), which passes on to here if it is a proxy")


def _silent(host: str, *, is_wildcard: bool) -> Finding:
    if not is_wildcard:
        return skip("announce", f"worker.announce is empty: workers are told where they listen ({host})")
    return warn(
        "announce",
        f"worker.host is {host}, every address, and nothing says which one others are to be told",
        "worker.announce=HOST:PORT at which others reach it; in a pod POD_IP by the downward API (status.podIP)",
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
