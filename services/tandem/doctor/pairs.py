"""Measure the links between workers by reading test blocks, and report slow or unexpected ones.

The consumer measures, over the transport that also moves KV (`ProbeLink` of worker.proto), because only the consumer
knows over which kind of link the bytes arrive.
"""

from __future__ import annotations

from typing import NamedTuple

import grpc.aio

from tandem.core.config import TransferConfig
from tandem.core.errors import TandemError
from tandem.core.link import LinkReport
from tandem.doctor.finding import Finding, Severity, fail, skip
from tandem.doctor.workers import MemberList, WorkerFacts, WorkerList
from tandem.wire.gen import worker_pb2
from tandem.wire.kv_codec import encode_worker, same_fields
from tandem.wire.link_codec import decode_link
from tandem.wire.peer_auth import reason_of
from tandem.wire.worker_codec import decode_refusal

MEASURE_S = 30.0
"""Time limit of one pair: connecting may take seconds, and so may the read over a slow link."""
FEW_PRODUCERS, FEW_PAIRS = 3, 16
"""Without --all-pairs: maximum number of producers for each consumer, and of pairs in all."""
_FIGURES = ("link_type", "num_bytes", "seconds", "evidence", "problem", "refused")


class Pair(NamedTuple):
    """Name two workers whose link is measured: `consumer` reads KV memory of `producer`."""

    consumer: WorkerFacts
    producer: WorkerFacts

    def __str__(self) -> str:
        return f"{self.consumer.ref.id} <- {self.producer.ref.id}"


def choose_pairs(worker_list: WorkerList, *, is_all: bool) -> tuple[Pair, ...]:
    """Choose the pairs of workers to measure, among the workers that answer. Both workers of a pair have the same
    model, fingerprint and transport (`WorkerFacts.kind`).

    With `is_all`, return every pair in both directions. Otherwise return at most `FEW_PAIRS` pairs, only in the
    direction in which prompts move: from a worker that prefills to one that decodes. Each consumer then has at most
    `FEW_PRODUCERS` producers."""
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


async def measure(members: MemberList, pair: Pair) -> LinkReport | Finding:
    """Let the consumer of a pair read test blocks from the producer, and return the consumer's report.

    `members` opens the connection to the consumer. If nothing was read, a finding is returned: skipped if the
    consumer's version cannot measure, otherwise a failure. Takes up to `MEASURE_S` seconds."""
    request = worker_pb2.ProbeLinkRequest(source=encode_worker(pair.producer.ref))
    try:
        async with members.stub(pair.consumer.ref) as stub:
            reply = await stub.ProbeLink(request, timeout=MEASURE_S)
        if reply.HasField("refusal"):
            raise decode_refusal(reply.refusal)
        return decode_link(reply.report)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return skip("pairs", f"{pair}: {pair.consumer.ref.id} cannot measure; its version is older")
        problem = reason_of(error)
    except TandemError as error:
        problem = error.message
    fix = (
        f"check that {pair.consumer.ref.id} can reach {pair.producer.ref.address} and UCX's own ports (pods of "
        "workers need all of them); the log of the first has NIXL's error"
    )
    return fail("pairs", f"{pair}: nothing moved: {problem}", fix)


def judge_link(pair: Pair, report: LinkReport, transfer: TransferConfig) -> Finding:
    """Return the finding on the link of `pair` that its consumer has measured: OK, a warning or a failure.

    The link has a problem if the consumer reports that the link misses the consumer's own requirements
    (`report.problem`), or if the report misses `transfer`, the requirements on the machine where the doctor runs. A
    problem is a failure if the consumer refuses hand-offs over this link (`report.refused`), otherwise a warning."""
    summary = f"{pair}  {report.link_type}  {report.gbps:.2f} GB/s  ({report.evidence or 'no evidence'})"
    problem = report.problem or _problem(report, transfer)
    figures = {
        "consumer": pair.consumer.ref.id,
        "producer": pair.producer.ref.id,
        "gbps": round(report.gbps, 3),
        **same_fields(report, _FIGURES),
    }
    if not problem:
        return Finding("pairs", Severity.OK, summary, figures=figures)
    verdict = Severity.FAIL if report.refused else Severity.WARN
    unused = "; it is not used" if report.refused else ""
    return Finding("pairs", verdict, f"{summary}: {problem}{unused}", _fix(report, transfer), figures)


def _problem(report: LinkReport, transfer: TransferConfig) -> str:
    """Return why a link does not meet the settings of this machine; empty if it does.

    A link of a type within a machine (shared_memory, cuda_ipc) meets a required rdma, since its workers need no
    network.
    """
    is_local = report.link_type in ("shared_memory", "cuda_ipc")
    if transfer.require not in ("any", report.link_type) and not (transfer.require == "rdma" and is_local):
        return f"transfer.require is {transfer.require}"
    if report.gbps < transfer.min_gbps:
        return f"transfer.min_gbps is {transfer.min_gbps:g}"
    return ""


def _fix(report: LinkReport, transfer: TransferConfig) -> str:
    if report.gbps < transfer.min_gbps:
        return (
            "run `tandem doctor --only rdma` on both machines, stop what else uses the link, or lower transfer.min_gbps"
        )
    fixes = {
        "rdma": "run `tandem doctor --only rdma,memlock,ucx` on both machines; in pods set `pools.<name>.rdma`",
        "cuda_ipc": "run both workers in one pod (`colocate: true`), with cuda_ipc in UCX_TLS",
        "shared_memory": "run both workers in one pod, and allow process_vm_readv (see the check `ucx`)",
    }
    return fixes.get(
        transfer.require, "correct the consumer's transfer.require and transfer.min_gbps, or use a link that meets them"
    )
