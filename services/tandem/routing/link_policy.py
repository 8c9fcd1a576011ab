"""What the link between two workers must be like, and which peers a worker measures; pure, never measures one.

Promises are about what can be. Workers of one machine are never asked for RDMA, which shared memory outdoes; cuda_ipc
is asked of two GPUs' memory on one machine, shared memory of two workers in host memory there, and of others neither.
`min_gbps` is asked of everybody.
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
"""2 to the 64th over the golden ratio: the middle bits of a product with it depend on all bits below them."""
NUM_PEERS = 3
"""Of each zone: so many a worker measures, and a gateway tests with it, when they meet."""


def has_requirements(promised: TransferConfig) -> bool:
    """Whether any way can be other than promised."""
    return promised.require != "any" or promised.min_gbps > 0


def evaluate(report: LinkReport, promised: TransferConfig, *, same_machine: bool, is_cuda: bool) -> LinkReport:
    """The report with its problem, if it has one. `same_machine` of both ends; `is_cuda`: GPU memory at both."""
    problem = _wrong_type(report, promised.require, same_machine, is_cuda) or _too_slow(report, promised.min_gbps)
    return replace(report, problem=problem, refused=bool(problem) and promised.on_slow_link == "refuse")


def unmeasured(source: WorkerRef, reason: str, promised: TransferConfig) -> LinkReport:
    """Of a way that could not be measured: what was promised of it is not shown. Where nothing was, hand-offs tell."""
    problem = f"it could not be measured: {reason}" if has_requirements(promised) else ""
    refused = bool(problem) and promised.on_slow_link == "refuse"
    return LinkReport(source=source, link_type="unknown", evidence=reason, problem=problem, refused=refused)


def _wrong_type(report: LinkReport, require: str, same_machine: bool, is_cuda: bool) -> str:
    is_asked = {
        "rdma": not same_machine,
        "cuda_ipc": same_machine and is_cuda,
        "shared_memory": same_machine and not is_cuda,
    }
    if not is_asked.get(require, False) or report.link_type == require:
        return ""
    found = "cannot be told" if report.link_type == "unknown" else f"is {report.link_type}"
    return f"transfer.require is {require}, the way {found} ({report.evidence})"


def _too_slow(report: LinkReport, min_gbps: float) -> str:
    if report.gbps >= min_gbps:
        return ""
    return f"transfer.min_gbps is {min_gbps:g}, the link carries {report.gbps:.3g} gigabytes per second"


def peers_to_probe(worker: WorkerId, peers: Iterable[tuple[WorkerRef, str]]) -> list[WorkerRef]:
    """Of (peer, its zone) at most NUM_PEERS of each zone, the same whoever asks. By the hash of both names (rendezvous
    hashing), so that load spreads and a peer that comes or goes changes one choice at most."""
    zones: defaultdict[str, list[WorkerRef]] = defaultdict(list)
    for peer, zone in peers:
        zones[zone].append(peer)
    mine = _hash(worker)

    def weight(peer: WorkerRef) -> tuple[int, WorkerRef]:
        return ((mine ^ _hash(peer.id)) * _MIX) >> 32 & _WORD, peer

    return [peer for zone in sorted(zones) for peer in nsmallest(NUM_PEERS, zones[zone], key=weight)]


@lru_cache(maxsize=1 << 16)
def _hash(worker: WorkerId) -> int:
    return int.from_bytes(hashlib.blake2b(worker.encode(), digest_size=8).digest(), "little")
