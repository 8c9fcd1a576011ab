"""Decide whether a link meets its requirements, and which peers a worker probes; pure functions.

`transfer.require` names a link type and applies only to links that can be of this type: "rdma" to links between
machines, because shared memory is faster within one; "cuda_ipc" to links between GPU memory on one machine; and
"shared_memory" to links between host memory on one machine. `transfer.min_gbps` applies to every link.
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
"""Number of peers per zone to which a worker measures its links, and with which a gateway tests the worker, when they
connect."""


def has_requirements(required: TransferConfig) -> bool:
    """Return whether the settings `required` demand anything of links, by `transfer.require` or `transfer.min_gbps`."""
    return required.require != "any" or required.min_gbps > 0


def evaluate(report: LinkReport, required: TransferConfig, *, same_machine: bool, is_cuda: bool) -> LinkReport:
    """Return a copy of a link's report with the fields `problem` and `refused` filled in.

    `same_machine`: both workers are on one machine; `is_cuda`: both hold KV in GPU memory. `problem` is empty when the
    link meets the settings `required`, otherwise a text that says which setting the link misses. `refused` is True when
    there is a problem and `transfer.on_slow_link` is "refuse".
    """
    problem = _wrong_type(report, required.require, same_machine, is_cuda) or _too_slow(report, required.min_gbps)
    return replace(report, problem=problem, refused=bool(problem) and required.on_slow_link == "refuse")


def unmeasured(source: WorkerRef, reason: str, required: TransferConfig) -> LinkReport:
    """Return the report of a link from the worker `source` that could not be measured; `reason`: why not, as text.

    The report has a problem only when the settings `required` demand anything of links. Without such settings the link
    may be used, and its first hand-offs will measure it.
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
    """Return the peers with which `worker` is tested, at most NUM_PEERS of each zone. `peers`: all possible peers, as
    pairs (peer, zone of the peer).

    The result is the same for every caller. Peers are chosen by a hash of the worker's and the peer's name (rendezvous
    hashing), so that load spreads, and a peer that appears or disappears changes at most one choice.
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
