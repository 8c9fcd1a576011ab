"""Fuzz targets: the messages of worker.proto, as a worker reads those of gateways and a gateway those of workers."""

from __future__ import annotations

from dataclasses import replace

from google.protobuf.message import DecodeError

from tandem.core.bundle import TokenizerBundle
from tandem.core.errors import ErrorKind
from tandem.core.events import (
    Cancelled,
    Failed,
    Finished,
    FinishReason,
    KVReceived,
    LaneYield,
    MigrationOffered,
    Pauses,
    Preemption,
    PromptLogprobs,
    SampledToken,
    Token,
)
from tandem.core.grammar import Grammar
from tandem.core.ids import GatewayId, HandoffId, HandoffKey, Incarnation, JobKey, RequestId, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.link import LinkReport
from tandem.core.request import GenerateJob, PrefillJob, RemotePrefix, Request, ResumeJob, SamplingParams
from tandem.core.request_stages import JobStages, Stage, Wait, WaitCause
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.job_codec import Submission, decode_key, decode_submission, encode_key, encode_submission
from tandem.wire.kv_codec import (
    decode_handoff_key,
    decode_peer,
    decode_worker,
    encode_handoff_key,
    encode_peer,
    encode_worker,
)
from tandem.wire.link_codec import decode_link, encode_link
from tandem.wire.worker_codec import (
    decode_books,
    decode_bundle,
    decode_lanes,
    decode_load,
    decode_step_cost,
    decode_update,
    encode_bundle,
    encode_load,
    encode_update,
)
from tests.hostile.kv_messages import PEER, SOURCE
from tests.hostile.surface import Surface

_KEY = JobKey(RequestId("r1"), 1, 0)
_SAMPLING = SamplingParams(
    max_tokens=20,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    seed=5,
    stop_token_ids=frozenset({1, 2}),
    logprobs=2,
    logit_bias=((5, -1.5),),
    grammar=Grammar("regex", "a+b"),
)
_REQUEST = Request(
    id=RequestId("r1"), model="tiny", prompt_tokens=(1, 2, 300), sampling=_SAMPLING, prompt_logprobs=1, cache_salt="s"
)
_PLAIN = Request(id=RequestId("r2"), model="tiny", prompt_tokens=(7,), sampling=SamplingParams(max_tokens=1))
_HANDOFF = HandoffId("h1")
_JOBS = (
    GenerateJob(request=_REQUEST, attempt=1, prefix=RemotePrefix(handoff=_HANDOFF, source=SOURCE, num_blocks=2)),
    GenerateJob(request=_PLAIN, attempt=2, output_tokens=(9,)),
    PrefillJob(request=_REQUEST, attempt=1, handoff=_HANDOFF),
    ResumeJob(request=_REQUEST, attempt=1, handoff=_HANDOFF, source=SOURCE),
)
_SUBMISSIONS = [Submission(GatewayId("g"), Incarnation(7), job) for job in _JOBS]


def _read_submission(data: bytes) -> None:
    """Read a Submit request. What was accepted is written and read back alike."""
    submission = decode_submission(pb.SubmitRequest.FromString(data))
    again = decode_submission(encode_submission(submission))
    assert again == submission


def _read_call(data: bytes) -> None:
    """Read bytes after the first as the call that the first byte names."""
    message = data[1:]
    match data[:1]:
        case b"c":
            for key in pb.CancelRequest.FromString(message).keys:
                assert decode_key(encode_key(decode_key(key))) == decode_key(key)
        case b"w":
            for position in pb.WatchRequest.FromString(message).positions:
                decode_key(position.key)
        case b"r":
            decode_handoff_key(pb.ReleaseRequest.FromString(message).key)
        case _:
            decode_worker(pb.ProbeLinkRequest.FromString(message).source)


def _read_watch(data: bytes) -> None:
    update = pb.WatchUpdate.FromString(data)
    if update.HasField("load"):
        decode_load(update.load)
    if update.HasField("step_cost"):
        decode_step_cost(update.step_cost)
    for report in update.links:
        decode_link(report)
    # Several runs of one job become one, which says of its first token only how many were cached and how long it took.
    events = [
        replace(event, num_cached_tokens=None, stages=None) if isinstance(event, Token) else event
        for event in decode_update(update)
    ]
    assert set(map(repr, decode_update(encode_update(events)))) == set(map(repr, events))


def _read_description(data: bytes) -> None:
    reply = pb.DescribeReply.FromString(data)
    decode_worker(reply.worker)
    decode_peer(reply.transport)
    decode_bundle(reply.bundle)
    decode_books(reply.books)
    decode_load(reply.load)
    decode_lanes(reply.lanes)
    for report in reply.links:
        decode_link(report)


_TOKEN = SampledToken(5, -0.5, ((5, -0.5), (6, -1.0)))
_STAGES = JobStages(0.5, 0.5, 0.5, 0.5, 0.5, (Wait(Stage.PREFILL_QUEUE, WaitCause.PROMPTS_AHEAD, 0.5, 100),))
_PREEMPTION = Preemption(Pauses(1, 0.5), (LaneYield(Lane.BATCH, 1, 100, 7),))
_EVENTS = (
    Token(_KEY, 0, _TOKEN, 4, _STAGES, _PREEMPTION),
    Token(_KEY, 1, SampledToken(6)),
    PromptLogprobs(_KEY, 1, (_TOKEN,)),
    MigrationOffered(_KEY, HandoffKey(_HANDOFF, 1)),
    KVReceived(_KEY, 1, 64, 0, 64, 0.1, 0.1, 0.1),
    Finished(_KEY, FinishReason.STOP, 2, 0),
    Failed(JobKey(RequestId("r2"), 1), ErrorKind.KV_LOST, "gone"),
    Cancelled(JobKey(RequestId("r3"), 1)),
)
_LINK = LinkReport(
    source=SOURCE, link_type="tcp", evidence="measured", num_bytes=100, seconds=0.5, problem="", refused=False
)
_UPDATE = encode_update(_EVENTS, WorkerLoad(), StepCost(0.1, 0.01, 0.01, 0.001, 0.001))
_UPDATE.links.append(encode_link(_LINK))
_DESCRIPTION = pb.DescribeReply(
    worker=encode_worker(WorkerRef(WorkerId("w"), Incarnation(3), "127.0.0.1:1")),
    transport=encode_peer(PEER),
    bundle=encode_bundle(TokenizerBundle(tokenizer_json=b"{}")),
    model="tiny",
    lanes=["batch"],
    load=encode_load(WorkerLoad()),
    links=[encode_link(_LINK)],
)
_CALLS = {
    b"c": pb.CancelRequest(keys=[encode_key(_KEY)]),
    b"w": pb.WatchRequest(gateway="g", positions=[pb.WatchPosition(key=encode_key(_KEY), next_index=5)]),
    b"r": pb.ReleaseRequest(key=encode_handoff_key(HandoffKey(_HANDOFF, 1))),
    b"p": pb.ProbeLinkRequest(source=encode_worker(SOURCE), num_bytes=1000),
}
SURFACES = {
    "worker-call": Surface(
        read=_read_call,
        seeds=tuple(sign + call.SerializeToString() for sign, call in _CALLS.items()),
        errors=(DecodeError,),
    ),
    "submission": Surface(
        read=_read_submission,
        seeds=tuple(encode_submission(each).SerializeToString() for each in _SUBMISSIONS),
        errors=(DecodeError,),
    ),
    "watch": Surface(
        read=_read_watch,
        seeds=(_UPDATE.SerializeToString(), encode_update(_EVENTS[:2]).SerializeToString()),
        errors=(DecodeError,),
    ),
    "description": Surface(read=_read_description, seeds=(_DESCRIPTION.SerializeToString(),), errors=(DecodeError,)),
}
