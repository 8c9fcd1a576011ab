"""The links between workers, each measured by reading a test block; never judges who should talk to whom in traffic.

The consumer does it, over the very transport that moves KV (`ProbeLink` of worker.proto): only it knows how bytes come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc.aio

from tandem.core.config import TransferConfig
from tandem.core.errors import TandemError
from tandem.doctor.finding import Finding, Severity, fail, skip
from tandem.doctor.workers import MemberList, WorkerFacts, WorkerList
from tandem.wire.gen import worker_pb2
from tandem.wire.peer_auth import reason_of

MEASURE_S = 30.0
"""Of one pair: connecting takes up to seconds, and over a slow link so does the block."""
FEW_PRODUCERS, FEW_PAIRS = 3, 16
"""Without --all-pairs: so many for each consumer, and in all."""


class Pair(NamedTuple):
    consumer: WorkerFacts
    producer: WorkerFacts

    def __str__(self) -> str:
        return f"{self.consumer.ref.id} <- {self.producer.ref.id}"


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """`error`: why no byte moved, else empty; `cannot`: the consumer's version knows no such call."""

    pair: Pair
    link_type: str = ""
    evidence: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    problem: str = ""
    is_refused: bool = False
    error: str = ""
    cannot: bool = False

    @property
    def gbps(self) -> float:
        """10^9 bytes per second."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0


def choose_pairs(fleet: WorkerList, *, is_all: bool) -> tuple[Pair, ...]:
    """Each with a partner of its kind. All: in both directions; else those by which prompts move, from
    a worker that prefills to one that decodes."""
    live = [worker for worker in fleet.workers if worker.is_live]
    partners = {t.ref.id: [g for g in live if g is not t and g.kind == t.kind] for t in live}
    if is_all:
        return tuple(Pair(consumer, producer) for consumer in live for producer in partners[consumer.ref.id])
    few = [
        Pair(consumer, producer)
        for consumer in live
        if consumer.role != "prefill"
        for producer in [g for g in partners[consumer.ref.id] if g.role != "decode"][:FEW_PRODUCERS]
    ]
    return tuple(few[:FEW_PAIRS])


async def measure(members: MemberList, pair: Pair) -> MeasuredPair:
    source = pair.producer.ref
    request = worker_pb2.ProbeLinkRequest(
        source={"id": source.id, "incarnation": source.incarnation, "address": source.address}
    )
    try:
        async with members.stub(pair.consumer.ref) as stub:
            reply = await stub.ProbeLink(request, timeout=MEASURE_S)
    except grpc.aio.AioRpcError as error:
        cannot = error.code() is grpc.StatusCode.UNIMPLEMENTED
        return MeasuredPair(pair, error=reason_of(error), cannot=cannot)
    except TandemError as error:
        return MeasuredPair(pair, error=error.message)
    report = reply.report
    if reply.HasField("refusal"):
        return MeasuredPair(pair, error=reply.refusal.message)
    return MeasuredPair(
        pair, report.link_type, report.evidence, report.num_bytes, report.seconds, report.problem, report.refused
    )


def judge_pair(measured: MeasuredPair, transfer: TransferConfig) -> Finding:
    """By what the consumer says of its own settings, and by ours where that has nothing to say."""
    pair = measured.pair
    if measured.cannot:
        return skip("pairs", f"{pair}: {pair.consumer.ref.id} cannot measure; it is of an older version")
    if measured.error:
        fix = (
            f"is {pair.producer.ref.address} open from {pair.consumer.ref.id}, and UCX's own ports too (pods of "
            "workers need all of them)? Its log says what NIXL met"
        )
        return fail("pairs", f"{pair}: nothing moved: {measured.error}", fix)
    told = f"{pair}  {measured.link_type}  {measured.gbps:.2f} GB/s  ({measured.evidence or 'no evidence'})"
    problem = measured.problem or _problem(measured, transfer)
    if not problem:
        return Finding("pairs", Severity.OK, told, figures=_figures(measured))
    verdict = Severity.FAIL if measured.is_refused else Severity.WARN
    unused = "; it is not used" if measured.is_refused else ""
    return Finding("pairs", verdict, f"{told}: {problem}{unused}", _fix(measured, transfer), _figures(measured))


def judge_choice(fleet: WorkerList, pairs: Sequence[Pair]) -> tuple[Finding, ...]:
    """Where there is nothing to measure."""
    if pairs:
        return ()
    return (skip("pairs", fleet.reason or "no two workers of one kind answer, one to give and one to take"),)


def _problem(measured: MeasuredPair, transfer: TransferConfig) -> str:
    """Workers of one machine are never asked for rdma, and only they know whether they are."""
    is_local = measured.link_type in ("shared_memory", "cuda_ipc")
    if transfer.require not in ("any", measured.link_type) and not (transfer.require == "rdma" and is_local):
        return f"transfer.require is {transfer.require}"
    if measured.gbps < transfer.min_gbps:
        return f"transfer.min_gbps is {transfer.min_gbps:g}"
    return ""


def _fix(measured: MeasuredPair, transfer: TransferConfig) -> str:
    if measured.gbps < transfer.min_gbps:
        return "the cards' rate (the check `rdma` on both machines) and what else uses the link, or a smaller min_gbps"
    fixes = {
        "rdma": "`tandem doctor` on both machines: the checks rdma, gid, memlock and ucx; in pods `pools.<name>.rdma`",
        "cuda_ipc": "both workers in one pod of one machine (`colocate: true`) and cuda_ipc in UCX_TLS",
        "shared_memory": "both workers on one machine in one pod, and process_vm_readv allowed (the check `ucx`)",
    }
    return fixes.get(
        transfer.require, "the consumer's transfer.require and transfer.min_gbps, or the way that they ask for"
    )


def _figures(measured: MeasuredPair) -> dict[str, object]:
    return {
        "consumer": measured.pair.consumer.ref.id,
        "producer": measured.pair.producer.ref.id,
        "link_type": measured.link_type,
        "gbps": round(measured.gbps, 3),
        "num_bytes": measured.num_bytes,
        "seconds": measured.seconds,
        "evidence": measured.evidence,
        "problem": measured.problem,
        "refused": measured.is_refused,
    }
