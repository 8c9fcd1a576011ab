"""Test what is required of a link, and which peers are probed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tandem.core.config import TransferConfig
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.link import LinkReport, LinkType
from tandem.routing.link_policy import NUM_PEERS, evaluate, has_requirements, peers_to_probe, unmeasured


def ref(name: str) -> WorkerRef:
    return WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1")


def report(link_type: LinkType, gbps: float = 10.0) -> LinkReport:
    return LinkReport(source=ref("p"), link_type=link_type, evidence="seen", num_bytes=int(gbps * 1e9), seconds=1.0)


@pytest.mark.parametrize(
    ("require", "link_type", "same_machine", "is_cuda", "is_well"),
    [
        ("any", "unknown", False, False, True),
        ("rdma", "rdma", False, False, True),
        ("rdma", "tcp", False, True, False),
        ("rdma", "unknown", False, False, False),
        ("rdma", "tcp", True, True, True),
        ("rdma", "shared_memory", True, False, True),
        ("cuda_ipc", "cuda_ipc", True, True, True),
        ("cuda_ipc", "tcp", True, True, False),
        ("cuda_ipc", "rdma", False, True, True),
        ("cuda_ipc", "shared_memory", True, False, True),
        ("shared_memory", "tcp", True, False, False),
        ("shared_memory", "shared_memory", True, False, True),
        ("shared_memory", "cuda_ipc", True, True, True),
        ("shared_memory", "tcp", False, False, True),
    ],
)
def test_a_link_is_required_only_what_it_can_be(
    require: Any, link_type: LinkType, same_machine: bool, is_cuda: bool, is_well: bool
) -> None:
    required = TransferConfig(require=require)
    found = evaluate(report(link_type), required, same_machine=same_machine, is_cuda=is_cuda)
    assert (not found.problem, not found.refused) == (is_well, is_well)
    if not is_well:
        assert f"transfer.require is {require}" in found.problem and "seen" in found.problem


@pytest.mark.parametrize(("on_slow_link", "is_refused"), [("refuse", True), ("warn", False)])
def test_a_slow_link_is_a_problem_and_refused_only_if_configured(on_slow_link: Any, is_refused: bool) -> None:
    required = TransferConfig(min_gbps=12.0, on_slow_link=on_slow_link)
    slow = evaluate(report("rdma", 11.9), required, same_machine=False, is_cuda=False)
    assert slow.problem == "transfer.min_gbps is 12, the link carries 11.9 gigabytes per second"
    assert slow.refused is is_refused
    assert not evaluate(report("rdma", 12.0), required, same_machine=False, is_cuda=False).problem


def test_an_unmeasured_link_is_a_problem_only_with_requirements() -> None:
    assert not has_requirements(TransferConfig()) and not unmeasured(ref("p"), "gone", TransferConfig()).problem
    for required in (TransferConfig(require="rdma"), TransferConfig(min_gbps=1.0)):
        assert has_requirements(required)
        found = unmeasured(ref("p"), "gone", required)
        assert found.refused and found.problem == "it could not be measured: gone" and found.link_type == "unknown"


def test_a_few_peers_of_each_zone_are_chosen_and_the_load_spreads() -> None:
    peers = [(ref(f"p{number}"), f"zone-{number % 2}") for number in range(40)]
    assert peers_to_probe(WorkerId("d"), peers[:3]) == sorted(
        peers_to_probe(WorkerId("d"), peers[:3]), key=lambda peer: dict(peers)[peer]
    )
    assert set(peers_to_probe(WorkerId("d"), peers[:5])) == {peer for peer, _ in peers[:5]}
    load: Counter[WorkerRef] = Counter()
    for number in range(200):
        mine = peers_to_probe(WorkerId(f"d{number}"), peers)
        assert Counter(dict(peers)[peer] for peer in mine) == {"zone-0": NUM_PEERS, "zone-1": NUM_PEERS}
        assert mine == peers_to_probe(WorkerId(f"d{number}"), reversed(peers))
        load.update(mine)
    assert len(load) == 40 and max(load.values()) < 3 * min(load.values()) + 20


def test_a_peer_that_disappears_changes_one_choice_at_most() -> None:
    peers = [(ref(f"p{number}"), "") for number in range(30)]
    for number in range(50):
        worker = WorkerId(f"d{number}")
        before, after = set(peers_to_probe(worker, peers)), set(peers_to_probe(worker, peers[1:]))
        assert before - after <= {peers[0][0]} and len(after) == NUM_PEERS
