"""Measure the links between workers by reading test blocks, and report slow or unexpected ones.

The consumer measures, over the transport that also moves KV (`ProbeLink` of worker.proto), because only the consumer
knows over which kind of link the bytes arrive.
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
"""Time limit of one pair: connecting may take seconds, and so may the read over a slow link."""
FEW_PRODUCERS, FEW_PAIRS = 3, 16
"""Without --all-pairs: maximum number of producers for each consumer, and of pairs in all."""


class Pair(NamedTuple):
    """Consumer that reads and producer whose memory is read."""

    consumer: WorkerFacts
    producer: WorkerFacts

    def __str__(self) -> str:
        return f"{self.consumer.ref.id} <- {self.producer.ref.id}"


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """Measurement of a pair.

    `error`: why nothing was read, else empty. `is_unsupported`: the consumer's version has no `ProbeLink`. `problem`:
    why the link does not meet the consumer's settings, else empty. `is_refused`: the pair is not used because of it.
    """

    pair: Pair
    link_type: str = ""
    evidence: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    problem: str = ""
    is_refused: bool = False
    error: str = ""
    is_unsupported: bool = False

    @property
    def gbps(self) -> float:
        """Bandwidth in 10^9 bytes per second."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0


def choose_pairs(worker_list: WorkerList, *, is_all: bool) -> tuple[Pair, ...]:
    """Choose pairs of workers of the same kind: all of them in both directions, or a few by which prompts move, from a
    worker that prefills to one that decodes."""
    live = [worker for worker in worker_list.workers if worker.is_live]
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
        is_unsupported = error.code() is grpc.StatusCode.UNIMPLEMENTED
        return MeasuredPair(pair, error=reason_of(error), is_unsupported=is_unsupported)
    except TandemError as error:
        return MeasuredPair(pair, error=error.message)
    report = reply.report
    if reply.HasField("refusal"):
        return MeasuredPair(pair, error=reply.refusal.message)
    return MeasuredPair(
        pair, report.link_type, report.evidence, report.num_bytes, report.seconds, report.problem, report.refused
    )


def judge_pair(measured: MeasuredPair, transfer: TransferConfig) -> Finding:
    """Report a measurement: by the consumer's own judgement of its settings, or else by our settings `transfer`."""
    pair = measured.pair
    if measured.is_unsupported:
        return skip("pairs", f"{pair}: {pair.consumer.ref.id} cannot measure; its version is older")
    if measured.error:
        fix = (
            f"check that {pair.consumer.ref.id} can reach {pair.producer.ref.address} and UCX's own ports (pods of "
            "workers need all of them); its log has NIXL's error"
        )
        return fail("pairs", f"{pair}: nothing moved: {measured.error}", fix)
    summary = f"{pair}  {measured.link_type}  {measured.gbps:.2f} GB/s  ({measured.evidence or 'no evidence'})"
    problem = measured.problem or _problem(measured, transfer)
    if not problem:
        return Finding("pairs", Severity.OK, summary, figures=_figures(measured))
    verdict = Severity.FAIL if measured.is_refused else Severity.WARN
    unused = "; it is not used" if measured.is_refused else ""
    return Finding("pairs", verdict, f"{summary}: {problem}{unused}", _fix(measured, transfer), _figures(measured))


def judge_choice(worker_list: WorkerList, pairs: Sequence[Pair]) -> tuple[Finding, ...]:
    """Report why there is nothing to measure; no finding if there are pairs."""
    if pairs:
        return ()
    return (
        skip("pairs", worker_list.reason or "no two workers of one kind answer, one as producer and one as consumer"),
    )


def _problem(measured: MeasuredPair, transfer: TransferConfig) -> str:
    """Return why a link does not meet our settings; empty if it does.

    Workers on one machine need no rdma. Only they know whether they are, so a local link type never misses it.
    """
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
        transfer.require, "the consumer's transfer.require and transfer.min_gbps, or a link that meets them"
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
