"""Decide whether a link meets its requirements, and which peers a worker probes; pure functions.

`transfer.require` applies only where the transport is possible. RDMA is not required within one machine, where shared
memory is faster; cuda_ipc is required between GPU memory on one machine, shared_memory between host memory on one
machine, and neither elsewhere. `min_gbps` is required of every link.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from heapq import nsmallest

from tandem.core.config import TransferConfig
from tandem.core.ids import WorkerId, WorkerRef
from tandem.core.link import LinkReport

_WORD = (1 << 32) - 1
_MIX = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: the middle bits of a product with it depend on all bits below them."""
NUM_PEERS = 3
"""Peers per zone that a worker measures, and with which a gateway tests it, when they connect."""


def has_requirements(required: TransferConfig) -> bool:
    """Return whether the settings require anything of links (`transfer.require` or `transfer.min_gbps`)."""
    return required.require != "any" or required.min_gbps > 0


def evaluate(report: LinkReport, required: TransferConfig, *, same_machine: bool, is_cuda: bool) -> LinkReport:
    """Return the report of a link with its fields `problem` and `refused` filled in.

    `same_machine`: both workers are on one machine; `is_cuda`: both hold KV in GPU memory. `problem` is empty when the
    link meets the requirements; `refused` links have a problem and `transfer.on_slow_link` is "refuse".
    """
    problem = _wrong_type(report, required.require, same_machine, is_cuda) or _too_slow(report, required.min_gbps)
    return replace(report, problem=problem, refused=bool(problem) and required.on_slow_link == "refuse")


def unmeasured(source: WorkerRef, reason: str, required: TransferConfig) -> LinkReport:
    """Return the report of a link from `source` that could not be measured because of `reason`.

    It has a problem only when the settings require anything of links; otherwise its first hand-offs will measure it.
    """
    problem = f"it could not be measured: {reason}" if has_requirements(required) else ""
    refused = bool(problem) and required.on_slow_link == "refuse"
    return LinkReport(source=source, link_type="unknown", evidence=reason, problem=problem, refused=refused)


def _wrong_type(report: LinkReport, require: str, same_machine: bool, is_cuda: bool) -> str:
    is_required = {
        "rdma": not same_machine,
        "cuda_ipc": same_machine and is_cuda,
        "shared_memory": same_machine and not is_cuda,
    }
    if not is_required.get(require, False) or report.link_type == require:
        return ""
    found = "type is unknown" if report.link_type == "unknown" else f"is {report.link_type}"
    return f"transfer.require is {require}, the link {found} ({report.evidence})"


def _too_slow(report: LinkReport, min_gbps: float) -> str:
    if report.gbps >= min_gbps:
        return ""
    return f"transfer.min_gbps is {min_gbps:g}, the link carries {report.gbps:.3g} gigabytes per second"


def peers_to_probe(worker: WorkerId, peers: Iterable[tuple[WorkerRef, str]]) -> list[WorkerRef]:
    """Return at most NUM_PEERS peers of each zone with which `worker` is tested; `peers` are pairs of a peer and its
    zone.

    The result is the same for every caller. It is chosen by the hashes of both names (rendezvous hashing), so that load
    spreads, and a peer that appears or disappears changes at most one choice.
    """
    zones: defaultdict[str, list[WorkerRef]] = defaultdict(list)
    for peer, zone in peers:
        zones[zone].append(peer)
    own_hash = _hash(worker)

    def weight(peer: WorkerRef) -> tuple[int, WorkerRef]:
        return ((own_hash ^ _hash(peer.id)) * _MIX) >> 32 & _WORD, peer

    return [peer for zone in sorted(zones) for peer in nsmallest(NUM_PEERS, zones[zone], key=weight)]


@lru_cache(maxsize=1 << 16)
def _hash(worker: WorkerId) -> int:
    return int.from_bytes(hashlib.blake2b(worker.encode(), digest_size=8).digest(), "little")
