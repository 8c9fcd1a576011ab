"""Build the trace spans of a job that has ended.

Children of the gateway's root span: `prefill` until the first token and `decode` after it, with `transfer` inside the
span that waited for it. Engine times are on the engine's own clock and traces count from the epoch; only this module
converts between the two.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.core.clock import Clock, wall_ns
from tandem.core.request import ResumeJob
from tandem.engine.job_timeline import JobTimes, PrefillChunk, PullTimes
from tandem.obs.tracing.tracing import SpanEvent, SpanRecord, Tracing
from tandem.worker.model.worker_info import WorkerInfo


class JobSpans:
    """Record the spans of ended jobs. `clock` is the engine's clock."""

    def __init__(self, tracing: Tracing, identity: WorkerInfo, clock: Clock) -> None:
        self._tracing = tracing
        self._identity = identity
        self._clock = clock

    def record(self, times: JobTimes) -> None:
        """Record the spans of a job if its request is traced."""
        traceparent = times.job.request.traceparent
        if self._tracing.would_record(traceparent):
            # Computed for each job, since the machine's wall clock may have been changed since the last one.
            origin = wall_ns() / 1e9 - self._clock.now()
            for span in job_spans(times, self._identity, origin):
                self._tracing.record(traceparent, span)


def job_spans(times: JobTimes, identity: WorkerInfo, origin: float) -> list[SpanRecord]:
    """Return the spans of a job in order. `origin` is the time of the engine clock's zero, in seconds since the
    epoch."""
    if isinstance(times.job, ResumeJob):
        return [_decode(times, identity, origin, times.accepted_at)]
    sampled_at = times.first_token_at
    if sampled_at is None or sampled_at == times.ended_at:
        return [_prefill(times, identity, origin, times.ended_at)]
    first = _prefill(times, identity, origin, sampled_at)
    return [first, _decode(times, identity, origin, sampled_at)]


def _prefill(times: JobTimes, identity: WorkerInfo, origin: float, end: float) -> SpanRecord:
    attributes = {
        **_common(times, identity),
        "tandem.prompt_tokens": len(times.job.request.prompt_tokens),
        "tandem.cached_tokens": times.num_cached,
        "tandem.queue_s": (end if times.started_at is None else times.started_at) - times.accepted_at,
    }
    # Chunks after `end` recompute a preempted sequence and belong to the decode span.
    chunks = [chunk for chunk in times.chunks if chunk.ended_at <= end]
    return SpanRecord(
        name="prefill",
        start=origin + times.accepted_at,
        end=origin + end,
        attributes=attributes,
        events=_events(chunks, origin),
        children=() if times.pull is None else (_transfer(times.pull, identity, origin),),
        error=times.error if end == times.ended_at else "",
        kind="server",
    )


def _decode(times: JobTimes, identity: WorkerInfo, origin: float, start: float) -> SpanRecord:
    attributes: dict[str, str | int | float | bool | tuple[str, ...]] = {
        **_common(times, identity),
        "tandem.output_tokens": times.num_output,
    }
    pull: PullTimes | None = None
    if isinstance(times.job, ResumeJob):
        pull = times.pull
        attributes["tandem.cached_tokens"] = times.num_cached
        if times.ready_at is not None and times.started_at is not None:
            attributes["tandem.queue_s"] = times.started_at - times.ready_at
    chunks = [chunk for chunk in times.chunks if chunk.ended_at > start]
    return SpanRecord(
        name="decode",
        start=origin + start,
        end=origin + times.ended_at,
        attributes=attributes,
        events=_events(chunks, origin),
        children=() if pull is None else (_transfer(pull, identity, origin),),
        error=times.error,
        kind="server",
    )


def _transfer(pull: PullTimes, identity: WorkerInfo, origin: float) -> SpanRecord:
    attributes: dict[str, str | int | float | bool | tuple[str, ...]] = {
        "tandem.transfer.kind": pull.kind,
        "tandem.transfer.outcome": pull.outcome,
        "tandem.transfer.source": str(pull.source.id),
        "tandem.transfer.transport": identity.transport_kind,
        "tandem.transfer.bytes": pull.num_bytes,
        "tandem.transfer.exposed_bytes": pull.num_exposed_bytes,
        "tandem.transfer.exposed_s": pull.exposed_s,
    }
    if pull.busy_s > 0:
        attributes["tandem.transfer.gb_per_s"] = pull.num_bytes / pull.busy_s / 1e9
    return SpanRecord(
        name="transfer",
        start=origin + pull.first_announced_at,
        end=origin + pull.ready_at,
        attributes=attributes,
        error="the KV could not be read" if pull.outcome == "failed" else "",
        kind="client",
    )


def _common(times: JobTimes, identity: WorkerInfo) -> dict[str, str | int | float | bool]:
    job = times.job
    attributes: dict[str, str | int | float | bool] = {
        "tandem.worker": str(identity.me.id),
        "tandem.pool": identity.pool,
        "tandem.job": str(job.key),
        "tandem.job.kind": times.kind,
        "tandem.job.outcome": times.outcome,
        "tandem.attempt": job.attempt,
        "gen_ai.request.model": job.request.model,
    }
    return attributes if times.error_kind is None else {**attributes, "error.type": times.error_kind.value}


def _events(chunks: Iterable[PrefillChunk], origin: float) -> tuple[SpanEvent, ...]:
    return tuple(
        SpanEvent(
            "chunk",
            origin + chunk.ended_at,
            {"tandem.tokens": chunk.num_tokens, "tandem.seconds": chunk.ended_at - chunk.planned_at},
        )
        for chunk in chunks
    )
