"""Encode and decode jobs as messages of worker.proto.

A malformed message raises TandemError(INVALID_REQUEST), as in `tandem.wire.worker_codec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_never, get_args

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import Grammar, GrammarKind
from tandem.core.ids import OPEN_TENANT, GatewayId, HandoffId, Incarnation, JobKey, RequestId, TenantId
from tandem.core.lane import Lane
from tandem.core.request import GenerateJob, Job, PrefillJob, RemotePrefix, Request, ResumeJob, SamplingParams
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.kv_codec import decode_worker, encode_worker, malformed, require, same_fields

MAX_TRACEPARENT = 64
"""Largest number of characters of a traceparent header; W3C Trace Context defines 55."""


@dataclass(frozen=True, slots=True)
class Submission:
    """Hold a job, the gateway that sends it, and the worker incarnation for which it is meant.

    The worker sends the job's tokens on the Watch stream of this gateway.
    """

    gateway: GatewayId
    incarnation: Incarnation
    job: Job


def encode_key(key: JobKey) -> pb.JobKey:
    return pb.JobKey(request=key.request, attempt=key.attempt, choice=key.choice)


def decode_key(message: pb.JobKey) -> JobKey:
    """Decode the key of a job. Raises TandemError(INVALID_REQUEST) where it names no request."""
    require(message.request, "a job key has no request")
    return JobKey(RequestId(message.request), message.attempt, message.choice)


_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens"),
    *("presence_penalty", "frequency_penalty"),
)


def encode_sampling(sampling: SamplingParams) -> pb.SamplingParams:
    grammar = sampling.grammar
    return pb.SamplingParams(
        stop_token_ids=sorted(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=[pb.TokenBias(token=token, bias=bias) for token, bias in sampling.logit_bias],
        grammar=None if grammar is None else pb.Grammar(kind=grammar.kind, source=grammar.source),
        **same_fields(sampling, _SAMPLING),
    )


def decode_sampling(message: pb.SamplingParams) -> SamplingParams:
    """Decode sampling parameters. Raises TandemError(INVALID_REQUEST) for an unknown kind of grammar or a value out of
    range.
    """
    return SamplingParams(
        stop_token_ids=frozenset(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=tuple((entry.token, entry.bias) for entry in message.logit_bias),
        grammar=_decode_grammar(message.grammar) if message.HasField("grammar") else None,
        **same_fields(message, _SAMPLING),
    )


def _decode_grammar(message: pb.Grammar) -> Grammar:
    for kind in get_args(GrammarKind):
        if kind == message.kind:
            return Grammar(kind, message.source)
    raise malformed(f"unknown kind of grammar {message.kind!r}")


_REQUEST = ("model", "prompt_tokens", "priority", "cache_salt", "lane", "tenant", "prompt_logprobs", "traceparent")


def encode_submission(submission: Submission) -> pb.SubmitRequest:
    """Encode a submission. Raises TandemError(INVALID_REQUEST) where a number from a client does not fit its protobuf
    field.
    """
    job, request = submission.job, submission.job.request
    try:
        message = pb.SubmitRequest(
            gateway=submission.gateway,
            key=encode_key(job.key),
            output_tokens=job.output_tokens,
            sampling=encode_sampling(request.sampling),
            incarnation=submission.incarnation,
            num_choices=job.num_choices,
            retain_ms=round(request.retain_s * 1e3),
            max_retained_tokens=request.max_retained_tokens,
            **same_fields(request, _REQUEST),
        )
    except (ValueError, TypeError) as error:
        raise TandemError(ErrorKind.INVALID_REQUEST, f"request {request.id} cannot be sent: {error}") from None
    match job:
        case GenerateJob():
            message.generate.CopyFrom(pb.GenerateJob(prefix=_encode_prefix(job.prefix)))
            message.generate.SetInParent()
        case PrefillJob():
            message.prefill.CopyFrom(pb.PrefillJob(handoff=job.handoff, prefix=_encode_prefix(job.prefix)))
        case ResumeJob():
            source = encode_worker(job.source)
            message.resume.CopyFrom(pb.ResumeJob(handoff=job.handoff, source=source, offer_attempt=job.offer_attempt))
        case _:
            assert_never(job)
    return message


def decode_submission(message: pb.SubmitRequest) -> Submission:
    """Decode a submission. Raises TandemError(INVALID_REQUEST) where it is malformed."""
    require(message.gateway, "a submission names no gateway")
    require(message.incarnation, "a submission names no incarnation")
    return Submission(GatewayId(message.gateway), Incarnation(message.incarnation), _decode_job(message))


def _decode_traceparent(text: str) -> str:
    """Return the traceparent, or "" if it is malformed: the job is not refused for it, since it affects only traces."""
    return text if len(text) <= MAX_TRACEPARENT and text.isascii() else ""


def _decode_job(message: pb.SubmitRequest) -> Job:
    key = decode_key(message.key)
    request = Request(
        id=key.request,
        model=message.model,
        prompt_tokens=tuple(message.prompt_tokens),
        sampling=decode_sampling(message.sampling),
        priority=message.priority,
        cache_salt=message.cache_salt,
        lane=_decode_lane(message.lane),
        tenant=TenantId(message.tenant or OPEN_TENANT),
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        retain_s=message.retain_ms / 1e3,
        max_retained_tokens=message.max_retained_tokens,
        traceparent=_decode_traceparent(message.traceparent),
    )
    common: dict[str, Any] = {
        "request": request,
        "attempt": key.attempt,
        "choice": key.choice,
        "num_choices": message.num_choices or 1,
        "output_tokens": tuple(message.output_tokens),
    }
    match message.WhichOneof("job"):
        case "generate":
            return GenerateJob(**common, prefix=_decode_prefix(message.generate))
        case "prefill":
            handoff = _decode_handoff(message.prefill.handoff)
            return PrefillJob(**common, handoff=handoff, prefix=_decode_prefix(message.prefill))
        case "resume":
            return ResumeJob(
                **common,
                handoff=_decode_handoff(message.resume.handoff),
                source=decode_worker(message.resume.source),
                offer_attempt=message.resume.offer_attempt,
            )
        case _:
            raise malformed("a submission has no job")


def _encode_prefix(prefix: RemotePrefix | None) -> pb.RemotePrefix | None:
    if prefix is None:
        return None
    source = encode_worker(prefix.source)
    return pb.RemotePrefix(handoff=prefix.handoff, source=source, num_blocks=prefix.num_blocks)


def _decode_prefix(job: pb.GenerateJob | pb.PrefillJob) -> RemotePrefix | None:
    """Decode the remote prefix of a job, if it has one; RemotePrefix itself checks its range."""
    if not job.HasField("prefix"):
        return None
    message = job.prefix
    source = decode_worker(message.source)
    return RemotePrefix(handoff=_decode_handoff(message.handoff), source=source, num_blocks=message.num_blocks)


def _decode_lane(value: int) -> Lane:
    try:
        return Lane(value)
    except ValueError:
        raise malformed(f"unknown lane {value}") from None


def _decode_handoff(handoff: str) -> HandoffId:
    require(handoff, "a job has no hand-off id")
    return HandoffId(handoff)
