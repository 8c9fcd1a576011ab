"""Encode and decode errors, job events, load reports and tokenizer bundles as messages of worker.proto.

`encode_*` takes values of `core`; `decode_*` takes a message from a peer. An incomplete or malformed message raises
TandemError(INVALID_REQUEST) and no other exception. `job_codec` handles jobs, `kv_codec` the messages of kv.proto.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import assert_never

from tandem.core.bundle import TokenizerBundle
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import (
    NO_PAUSES,
    Cancelled,
    Failed,
    Finished,
    FinishReason,
    JobEvent,
    KVReceived,
    LaneYield,
    MigrationOffered,
    Pauses,
    Preempted,
    Preemption,
    PromptLogprobs,
    TerminalEvent,
    Token,
)
from tandem.core.ids import JobKey
from tandem.core.lane import Lane, lanes_of
from tandem.core.request_stages import JobStages, Stage, Wait, WaitCause
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import PROMPT_SIZES, EngineStats, WorkerLoad
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.job_codec import decode_key, encode_key
from tandem.wire.kv_codec import (
    decode_handoff_key,
    decode_sampled,
    decode_worker,
    encode_handoff_key,
    encode_sampled,
    encode_worker,
    malformed,
    require,
    same_fields,
)

# ---- errors

_ERROR_KINDS = {kind.value: kind for kind in ErrorKind}


def encode_refusal(kind: ErrorKind, message: str) -> pb.Refusal:
    """Encode the error by which a worker refuses a call: its kind and its message."""
    return pb.Refusal(kind=kind.value, message=message)


def decode_refusal(message: pb.Refusal) -> TandemError:
    """Decode a refusal and return its error, without raising it."""
    return TandemError(decode_kind(message.kind), message.message)


def decode_kind(value: str) -> ErrorKind:
    """Return the error kind named `value`; INTERNAL for a name that this version does not know."""
    return _ERROR_KINDS.get(value, ErrorKind.INTERNAL)


def decode_lanes(labels: Iterable[str]) -> frozenset[Lane]:
    """Return the lanes that `labels` name, whose requests a worker takes. Raises TandemError(INVALID_REQUEST) for an
    unknown label."""
    try:
        return lanes_of(labels)
    except ValueError as error:
        raise malformed(str(error)) from None


# ---- events


_STAGES = tuple(name for name in JobStages._fields if name != "waits")
_WAIT_STAGES = {stage.value: stage for stage in Stage}
_WAIT_CAUSES = {cause.value: cause for cause in WaitCause}


def encode_update(
    events: Iterable[JobEvent], load: WorkerLoad | None = None, step_cost: StepCost | None = None
) -> pb.WatchUpdate:
    """Encode the job events of one engine step as one message of a Watch stream. `load`, `step_cost`: the worker's load
    and step cost, which the message contains if they are not None.

    The tokens of one job must be in the order of their indices.
    """
    update = pb.WatchUpdate()
    runs: dict[JobKey, pb.TokenRun] = {}
    for event in events:
        match event:
            case Token():
                _add_token(update, runs, event)
            case MigrationOffered():
                key, offer = encode_key(event.key), encode_handoff_key(event.offer)
                update.moving.append(pb.JobMigration(key=key, offer=offer, requested=event.is_requested))
            case Preempted():
                update.preempted.append(pb.JobPreemption(key=encode_key(event.key), next_index=event.next_index))
            case PromptLogprobs():
                update.scores.append(_encode_scores(event))
            case KVReceived():
                update.pulled.append(_encode_pulled(event))
            case Finished() | Failed() | Cancelled():
                update.ends.append(_encode_end(event))
            case _:
                assert_never(event)
    if load is not None:
        update.load.CopyFrom(encode_load(load))
    if step_cost is not None:
        update.step_cost.CopyFrom(encode_step_cost(step_cost))
    return update


def _add_token(update: pb.WatchUpdate, runs: dict[JobKey, pb.TokenRun], event: Token) -> None:
    run = runs.get(event.key)
    if run is None or event.index != run.first_index + len(run.tokens) or event.preemption is not None:
        run = runs[event.key] = update.runs.add(key=encode_key(event.key), first_index=event.index)
    if event.num_cached_tokens is not None:
        run.num_cached_tokens = event.num_cached_tokens
    if event.stages is not None:
        run.stages.CopyFrom(_encode_stages(event.stages))
    if event.preemption is not None:
        _add_preemption(run, event.preemption)
    encode_sampled(event.token, run.tokens.add())


def _add_preemption(run: pb.TokenRun, preemption: Preemption) -> None:
    run.num_pauses, run.paused_s = preemption.pauses
    counts = {yielded.lane: yielded[1:] for yielded in preemption.yields}
    for lane in Lane if counts else ():
        num_sequences, num_tokens, num_blocks = counts.get(lane, (0, 0, 0))
        run.yielded_sequences.append(num_sequences)
        run.yielded_tokens.append(num_tokens)
        run.yielded_blocks.append(num_blocks)


def _encode_stages(stages: JobStages) -> pb.JobStages:
    return pb.JobStages(
        **dict(zip(_STAGES, stages.seconds, strict=True)),
        wait_stages=[wait.stage.value for wait in stages.waits],
        wait_causes=[wait.cause.value for wait in stages.waits],
        waits_s=[wait.seconds for wait in stages.waits],
        num_tokens_ahead=max((wait.num_tokens_ahead for wait in stages.waits), default=0),
    )


def _encode_scores(event: PromptLogprobs) -> pb.PromptScores:
    message = pb.PromptScores(key=encode_key(event.key), first_index=event.first_index)
    for token in event.tokens:
        encode_sampled(token, message.tokens.add())
    return message


_PULLED = ("num_blocks", "num_bytes", "num_cached_tokens", "num_exposed_bytes")


def _encode_pulled(event: KVReceived) -> pb.PulledKV:
    return pb.PulledKV(
        key=encode_key(event.key),
        total_seconds=event.total_s,
        exposed_seconds=event.exposed_s,
        busy_seconds=event.busy_s,
        source=None if event.source is None else encode_worker(event.source),
        **same_fields(event, _PULLED),
    )


def _encode_end(event: TerminalEvent) -> pb.JobEnd:
    key = encode_key(event.key)
    match event:
        case Finished():
            reason = "" if event.reason is None else event.reason.value
            counts = {"num_output_tokens": event.num_output_tokens, "num_cached_tokens": event.num_cached_tokens}
            return pb.JobEnd(key=key, finished=pb.JobFinished(reason=reason, **counts))
        case Failed():
            return pb.JobEnd(key=key, failed=encode_refusal(event.kind, event.message))
        case Cancelled():
            return pb.JobEnd(key=key, cancelled=pb.JobCancelled())
        case _:
            assert_never(event)


def decode_update(message: pb.WatchUpdate) -> tuple[JobEvent, ...]:
    """Return the job events in a message of a Watch stream, without its load and step cost.

    The order of the events is: received KV, prompt log probabilities, offered migrations, preemptions, then the tokens
    of each job in the order of their indices, then the ends of jobs. Raises TandemError(INVALID_REQUEST) where the
    message is malformed.
    """
    events: list[JobEvent] = [_decode_pulled(pulled) for pulled in message.pulled]
    events += [_decode_scores(scores) for scores in message.scores]
    events += [
        MigrationOffered(decode_key(each.key), decode_handoff_key(each.offer), each.requested)
        for each in message.moving
    ]
    events += [Preempted(decode_key(each.key), each.next_index) for each in message.preempted]
    for run in message.runs:
        key = decode_key(run.key)
        num_cached = run.num_cached_tokens if run.HasField("num_cached_tokens") else None
        stages = _decode_stages(run.stages) if run.HasField("stages") else None
        preemption = _decode_preemption(run)
        for index, token in enumerate(run.tokens, run.first_index):
            events.append(Token(key, index, decode_sampled(token), num_cached, stages, preemption))
            num_cached = stages = preemption = None
    events.extend(_decode_end(end) for end in message.ends)
    return tuple(events)


def _decode_stages(message: pb.JobStages) -> JobStages:
    """Decode the durations of a job's stages and waits; an invalid one (negative, infinite, NaN) becomes 0. Waits that
    only newer versions know are left out."""
    waits: list[Wait] = []
    require(
        len(message.wait_stages) == len(message.wait_causes) == len(message.waits_s) <= len(Stage) * len(WaitCause),
        "a job's waits have unequal numbers of stages, causes and seconds, or are too many",
    )
    for stage, cause, seconds in zip(message.wait_stages, message.wait_causes, message.waits_s, strict=True):
        if stage in _WAIT_STAGES and cause in _WAIT_CAUSES:
            num_tokens = message.num_tokens_ahead if cause == WaitCause.PROMPTS_AHEAD.value else 0
            waits.append(Wait(_WAIT_STAGES[stage], _WAIT_CAUSES[cause], _duration(seconds), num_tokens))
    return JobStages.of((_duration(getattr(message, name)) for name in _STAGES), tuple(waits))


def _decode_preemption(run: pb.TokenRun) -> Preemption | None:
    """Decode how often and how long a choice was paused, and what yielded to it, by lane; lanes of which nothing
    yielded are left out. Returns None where the choice was not paused and nothing yielded to it."""
    if not (run.num_pauses or run.yielded_sequences):
        return None
    pauses = Pauses(run.num_pauses, _duration(run.paused_s)) if run.num_pauses else NO_PAUSES
    by_lane = run.yielded_sequences, run.yielded_tokens, run.yielded_blocks
    lengths = set(map(len, by_lane))
    require(lengths in ({0}, {len(Lane)}), "yielded sequences have an unexpected number of lanes")
    lanes = Lane if run.yielded_sequences else ()
    yields = tuple(LaneYield(*counts) for counts in zip(lanes, *by_lane, strict=True) if counts[1])
    return Preemption(pauses, yields) if run.num_pauses or yields else None


def _duration(seconds: float) -> float:
    return seconds if 0 <= seconds < math.inf else 0.0


def _decode_scores(message: pb.PromptScores) -> PromptLogprobs:
    return PromptLogprobs(decode_key(message.key), message.first_index, tuple(map(decode_sampled, message.tokens)))


def _decode_pulled(message: pb.PulledKV) -> KVReceived:
    return KVReceived(
        key=decode_key(message.key),
        total_s=message.total_seconds,
        exposed_s=message.exposed_seconds,
        busy_s=message.busy_seconds,
        source=decode_worker(message.source) if message.HasField("source") else None,
        **same_fields(message, _PULLED),
    )


def _decode_end(message: pb.JobEnd) -> TerminalEvent:
    key = decode_key(message.key)
    match message.WhichOneof("end"):
        case "finished":
            end = message.finished
            return Finished(key, _decode_reason(end.reason), end.num_output_tokens, end.num_cached_tokens)
        case "failed":
            return Failed(key, decode_kind(message.failed.kind), message.failed.message)
        case "cancelled":
            return Cancelled(key)
        case _:
            raise malformed(f"the end of {key} has no kind")


def _decode_reason(value: str) -> FinishReason | None:
    if not value:
        return None
    try:
        return FinishReason(value)
    except ValueError:
        raise malformed(f"unknown finish reason {value!r}") from None


# ---- load, step cost and engine statistics ("books"): protobuf and Python fields have the same names

_LOAD = tuple(field.name for field in fields(WorkerLoad))
_STEP_COST = tuple(field.name for field in fields(StepCost))
_STATS = tuple(field.name for field in fields(EngineStats))
_BUNDLE = tuple(field.name for field in fields(TokenizerBundle))
_BY_LANE = ("lane_tokens", "lane_longest", "size_tokens", "size_longest", "lane_seqs", "lane_blocks", "lane_paused")


def encode_load(load: WorkerLoad) -> pb.Load:
    return pb.Load(**same_fields(load, _LOAD))


def decode_load(message: pb.Load) -> WorkerLoad:
    """Decode a worker's load report. Raises TandemError(INVALID_REQUEST) where its lists have unexpected lengths."""
    for tokens, longest in (("lane_tokens", "lane_longest"), ("size_tokens", "size_longest")):
        if len(getattr(message, tokens)) != len(getattr(message, longest)):
            raise malformed(f"a load has unequal numbers of {tokens} and {longest}")
    for num_lanes in map(len, (message.lane_tokens, message.lane_seqs, message.lane_blocks, message.lane_paused)):
        require(num_lanes in (0, len(Lane)), "a load has an unexpected number of lanes")
    num_sizes = len(message.lane_tokens) * len(PROMPT_SIZES)
    require(len(message.size_tokens) in (0, num_sizes), "a load has an unexpected number of prompt sizes")
    return WorkerLoad(**same_fields(message, _LOAD) | {name: tuple(getattr(message, name)) for name in _BY_LANE})


def encode_step_cost(cost: StepCost) -> pb.StepCost:
    return pb.StepCost(**same_fields(cost, _STEP_COST))


def decode_step_cost(message: pb.StepCost) -> StepCost:
    """Decode the coefficients that predict a worker's step times. Raises TandemError(INVALID_REQUEST) where one is
    negative or not finite.
    """
    try:
        return StepCost(**same_fields(message, _STEP_COST))
    except ValueError as error:
        raise malformed(str(error)) from None


def encode_books(books: EngineStats) -> pb.Books:
    """Encode the statistics of a worker's engine: the numbers of its blocks, sequences, leases and pulls."""
    return pb.Books(**same_fields(books, _STATS))


def decode_books(message: pb.Books) -> EngineStats:
    """Decode the statistics of a worker's engine: the numbers of its blocks, sequences, leases and pulls."""
    return EngineStats(**same_fields(message, _STATS))


# ---- tokenizer bundles, with which gateways tokenize


def encode_bundle(bundle: TokenizerBundle) -> pb.TokenizerBundle:
    return pb.TokenizerBundle(**same_fields(bundle, _BUNDLE))


def decode_bundle(message: pb.TokenizerBundle) -> TokenizerBundle:
    return TokenizerBundle(**same_fields(message, _BUNDLE))
