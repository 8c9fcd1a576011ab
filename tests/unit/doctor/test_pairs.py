"""Test which links are measured, and the findings on them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.clock import SystemClock
from tandem.core.config import TransferConfig
from tandem.core.link import LinkReport
from tandem.doctor.finding import Finding
from tandem.doctor.pairs import FEW_PAIRS, Pair, choose_pairs, judge_link, measure
from tandem.doctor.workers import WorkerList, read_workers
from tandem.wire.gen import worker_pb2 as pb
from tests.ports import free_port
from tests.unit.doctor.cluster import Double, running, worker
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns

ANY = TransferConfig()
PAIR = Pair(worker("d"), worker("p"))
FAST = LinkReport(
    source=PAIR.producer.ref, link_type="rdma", evidence="port counters rose", num_bytes=64 << 20, seconds=0.01
)


def names(pairs: tuple[Pair, ...]) -> list[str]:
    return [str(pair) for pair in pairs]


def test_few_pairs_go_from_prefill_to_decode_workers() -> None:
    worker_list = WorkerList((worker("p0", "prefill"), worker("p1", "prefill"), worker("d", "decode"), worker("m")))
    assert names(choose_pairs(worker_list, is_all=False)) == ["d <- p0", "d <- p1", "d <- m", "m <- p0", "m <- p1"]
    assert len(choose_pairs(worker_list, is_all=True)) == 12
    assert "p0 <- d" in names(choose_pairs(worker_list, is_all=True))


def test_few_pairs_are_limited() -> None:
    workers = [worker(f"p{i}", "prefill") for i in range(9)] + [worker(f"d{i}", "decode") for i in range(9)]
    chosen = choose_pairs(WorkerList(tuple(workers)), is_all=False)
    assert len(chosen) == FEW_PAIRS and len({pair.consumer.ref for pair in chosen}) == 6


def test_only_partners_that_answer() -> None:
    worker_list = WorkerList(
        (
            worker("a"),
            worker("b", fingerprint="e"),
            worker("c", model="big"),
            worker("d", problem="gone"),
            worker("e", transport="local"),
        )
    )
    assert choose_pairs(worker_list, is_all=True) == ()


async def test_the_consumer_measures() -> None:
    report = pb.LinkReport(
        source={"id": "p", "incarnation": 1, "address": "p:1"},
        link_type="tcp",
        evidence="eth0 rose",
        num_bytes=1 << 20,
        seconds=0.5,
        problem="slow",
        refused=True,
    )
    links = {
        "p": pb.ProbeLinkReply(report=report),
        "q": pb.ProbeLinkReply(refusal=pb.Refusal(message="unknown worker")),
    }
    description = pb.DescribeReply(role="mixed", model="smol")
    consumer = Double(description, links)
    async with running(
        {"d": consumer, "p": Double(description), "q": Double(description), "r": Double(description)}
    ) as listed:
        worker_list = await read_workers(listed, SystemClock())
        d, *producers = worker_list.workers
        p, q, r = [await measure(listed, Pair(d, producer)) for producer in producers]
    assert consumer.probed == ["p", "q", "r"]
    assert isinstance(p, LinkReport) and isinstance(q, Finding) and isinstance(r, Finding)
    assert (p.link_type, p.evidence, p.num_bytes, p.seconds, p.problem, p.refused) == (
        *("tcp", "eth0 rose", 1 << 20, 0.5, "slow", True),
    )
    assert_fails(q, "pairs", "nothing moved: unknown worker", "check that d can reach")
    assert_skips(r, "pairs", "d cannot measure; its version is older")
    lost = replace(d, ref=replace(d.ref, address=f"127.0.0.1:{free_port()}"))
    absent = await measure(listed, Pair(lost, producers[0]))
    assert isinstance(absent, Finding)
    assert_fails(absent, "pairs", "nothing moved: unavailable", "check that d can reach")


def test_a_link_that_meets_the_settings() -> None:
    finding = judge_link(PAIR, FAST, TransferConfig(require="rdma", min_gbps=6.0))
    assert_fine(finding, "pairs", "d <- p  rdma  6.71 GB/s  (port counters rose)")
    assert finding.figures["gbps"] == 6.711 and finding.figures["consumer"] == "d"
    near = judge_link(PAIR, replace(FAST, link_type="shared_memory"), TransferConfig(require="rdma"))
    assert_fine(near, "pairs", "shared_memory")


@pytest.mark.parametrize(
    ("measured", "transfer", "found", "fix"),
    [
        (
            replace(FAST, link_type="tcp"),
            TransferConfig(require="rdma"),
            "transfer.require is rdma",
            "`pools.<name>.rdma`",
        ),
        (FAST, TransferConfig(require="cuda_ipc"), "transfer.require is cuda_ipc", "`colocate: true`"),
        (FAST, TransferConfig(require="shared_memory"), "transfer.require is shared_memory", "process_vm_readv"),
        (FAST, TransferConfig(min_gbps=7.0), "transfer.min_gbps is 7", "lower transfer.min_gbps"),
        (replace(FAST, problem="1 GB/s of 5"), ANY, "1 GB/s of 5", "the consumer's transfer.require"),
    ],
)
def test_a_link_that_does_not_meet_the_settings(
    measured: LinkReport, transfer: TransferConfig, found: str, fix: str
) -> None:
    assert_warns(judge_link(PAIR, measured, transfer), "pairs", found, fix)


def test_a_link_that_is_not_used() -> None:
    finding = judge_link(PAIR, replace(FAST, problem="tcp, not rdma", refused=True), ANY)
    assert_fails(finding, "pairs", "tcp, not rdma; it is not used", "the consumer's transfer.require")
    assert finding.figures["refused"] is True
