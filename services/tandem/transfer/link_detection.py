"""Which way bytes have taken, concluded from what the machine has counted meanwhile; pure, never reads a counter.

Neither NIXL nor UCX tells which transport carried a read: `query_xfer_backend` says UCX, its telemetry counts bytes and
time, and what UCX logs of its choice is for people. What counts is what rose: a TCP connection shows in the counters of
network interfaces, over loopback too, RDMA past the kernel only in those of RDMA ports. TCP over InfiniBand raises
both, so interfaces are asked first. A driver that counts RoCE in its interface's statistics too looks like TCP: better
that than RDMA claimed where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.core.link import LinkType

_SHARE = 0.9
"""Of the bytes read must have been counted: headers make it more, statistics that lag behind a little less."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes received since boot, by RDMA port and by network interface, at a moment of the caller's clock."""

    at: float
    rdma: Mapping[str, int]
    network: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LinkEndpoints:
    """Both ends of a read. `transport`: "local" or "nixl"; `same_machine`: under one kernel, whatever the containers;
    devices as `KVRegion` has them."""

    transport: str
    same_machine: bool
    device: str
    source_device: str

    @property
    def is_cuda(self) -> bool:
        """GPU memory at both."""
        return all(device.startswith("cuda") for device in (self.device, self.source_device))


@dataclass(frozen=True, slots=True)
class TransferSample:
    """`num_bytes` were read between the counters of `before` and `after`; from `idle` to `before` nothing of it was."""

    num_bytes: int
    idle: Counters
    before: Counters
    after: Counters


def detect_link_type(moved: TransferSample, ends: LinkEndpoints) -> tuple[LinkType, str]:
    """The way, and what it was concluded from, for people."""
    if ends.transport == "local":
        return "shared_memory", "the local transport reads the other process's memory"
    network, rdma = (_risen(moved, kind) for kind in ("network", "rdma"))
    rose = f"of {_mb(moved.num_bytes)} read, network interfaces received {_told(network)}, RDMA ports {_told(rdma)}"
    enough = _SHARE * moved.num_bytes
    if sum(network.values()) >= enough:
        return "tcp", rose
    if sum(rdma.values()) >= enough:
        return "rdma", rose
    if not ends.same_machine:
        return "unknown", f"{rose}, and the source is on another machine"
    if ends.is_cuda:
        return "cuda_ipc", f"{rose}; GPU memory of one machine"
    return "shared_memory", f"{rose}; one machine"


def _risen(moved: TransferSample, kind: str) -> dict[str, float]:
    """Bytes by which each counter rose, less what it would have by its rate before."""
    idle, before, after = (getattr(counters, kind) for counters in (moved.idle, moved.before, moved.after))
    idle_s = moved.before.at - moved.idle.at
    times = (moved.after.at - moved.before.at) / idle_s if idle_s > 0 else 0.0
    risen: dict[str, float] = {}
    for name in before.keys() & after.keys():
        usual = max(0, before[name] - idle.get(name, before[name])) * times
        risen[name] = max(0.0, after[name] - before[name] - usual)
    return risen


def _told(risen: Mapping[str, float]) -> str:
    if not risen:
        return "nothing: there are none"
    most = max(risen, key=lambda name: risen[name])
    return f"{_mb(sum(risen.values()))} ({most} most)" if risen[most] >= 1 else "nothing"


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
