"""Build the trace spans of a job that has ended.

The spans `prefill` (until the first token) and `decode` (after it) are children of the gateway's root span; `transfer`
is a child of the one of them that waited for it. The engine's times are seconds of its own clock, while traces need
times since the epoch; only this module converts between the two.
"""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer, get_current_span, set_span_in_context

from tandem.core.clock import Clock, wall_ns
from tandem.core.request import ResumeJob
from tandem.engine.job_timeline import JobTimes, PrefillChunk, PullTimes
from tandem.obs.tracing import end_span, nanoseconds, remote_parent
from tandem.worker.model.worker_info import WorkerInfo


class JobSpans:
    """Record the trace spans of ended jobs. `clock` is the engine's clock, which has measured the times in
    `JobTimes`."""

    def __init__(self, tracer: Tracer, identity: WorkerInfo, clock: Clock) -> None:
        self._tracer = tracer
        self._identity = identity
        self._clock = clock

    def record(self, times: JobTimes) -> None:
        """Record the spans of an ended job if its request is traced and sampled; otherwise do nothing."""
        traceparent = times.job.request.traceparent
        if not traceparent:
            return
        parent = remote_parent(traceparent)
        if not get_current_span(parent).get_span_context().trace_flags.sampled:
            return
        # Computed for each job, since the machine's wall clock may have been changed since the last one.
        origin = wall_ns() / 1e9 - self._clock.now()
        if isinstance(times.job, ResumeJob):
            self._decode(times, parent, origin, times.accepted_at)
        elif times.first_token_at is None or times.first_token_at == times.ended_at:
            self._prefill(times, parent, origin, times.ended_at)
        else:
            self._prefill(times, parent, origin, times.first_token_at)
            self._decode(times, parent, origin, times.first_token_at)

    def _prefill(self, times: JobTimes, parent: Context, origin: float, end: float) -> None:
        """Record the span until the first token. `origin` is the time of the engine clock's zero, in seconds since the
        epoch."""
        span = self._start("prefill", parent, SpanKind.SERVER, origin + times.accepted_at)
        span.set_attributes(
            {
                **self._common(times),
                "tandem.prompt_tokens": len(times.job.request.prompt_tokens),
                "tandem.cached_tokens": times.num_cached,
                "tandem.queue_s": (end if times.started_at is None else times.started_at) - times.accepted_at,
            }
        )
        # Chunks after `end` recompute a preempted sequence and belong to the decode span.
        _add_chunks(span, [chunk for chunk in times.chunks if chunk.ended_at <= end], origin)
        if times.pull is not None:
            self._transfer(times.pull, span, origin)
        end_span(span, origin + end, times.error if end == times.ended_at else "")

    def _decode(self, times: JobTimes, parent: Context, origin: float, start: float) -> None:
        """Record the span after the first token. `origin` as for `_prefill`."""
        span = self._start("decode", parent, SpanKind.SERVER, origin + start)
        span.set_attributes({**self._common(times), "tandem.output_tokens": times.num_output})
        if isinstance(times.job, ResumeJob):
            span.set_attribute("tandem.cached_tokens", times.num_cached)
            if times.ready_at is not None and times.started_at is not None:
                span.set_attribute("tandem.queue_s", times.started_at - times.ready_at)
            if times.pull is not None:
                self._transfer(times.pull, span, origin)
        _add_chunks(span, [chunk for chunk in times.chunks if chunk.ended_at > start], origin)
        end_span(span, origin + times.ended_at, times.error)

    def _transfer(self, pull: PullTimes, waiting: Span, origin: float) -> None:
        """Record the span of a pull as a child of the span that waited for it."""
        parent = set_span_in_context(waiting, Context())
        span = self._start("transfer", parent, SpanKind.CLIENT, origin + pull.first_announced_at)
        span.set_attributes(
            {
                "tandem.transfer.kind": pull.kind,
                "tandem.transfer.outcome": pull.outcome,
                "tandem.transfer.source": str(pull.source.id),
                "tandem.transfer.transport": self._identity.transport_kind,
                "tandem.transfer.bytes": pull.num_bytes,
                "tandem.transfer.exposed_bytes": pull.num_exposed_bytes,
                "tandem.transfer.exposed_s": pull.exposed_s,
            }
        )
        if pull.busy_s > 0:
            span.set_attribute("tandem.transfer.gb_per_s", pull.num_bytes / pull.busy_s / 1e9)
        end_span(span, origin + pull.ready_at, "the KV could not be read" if pull.outcome == "failed" else "")

    def _start(self, name: str, parent: Context, kind: SpanKind, start_s: float) -> Span:
        return self._tracer.start_span(name, parent, kind, start_time=nanoseconds(start_s))

    def _common(self, times: JobTimes) -> dict[str, str | int]:
        job = times.job
        attributes: dict[str, str | int] = {
            "tandem.worker": str(self._identity.me.id),
            "tandem.pool": self._identity.pool,
            "tandem.job": str(job.key),
            "tandem.job.kind": times.kind,
            "tandem.job.outcome": times.outcome,
            "tandem.attempt": job.attempt,
            "gen_ai.request.model": job.request.model,
        }
        return attributes if times.error_kind is None else {**attributes, "error.type": times.error_kind.value}


def _add_chunks(span: Span, chunks: Iterable[PrefillChunk], origin: float) -> None:
    for chunk in chunks:
        attributes = {"tandem.tokens": chunk.num_tokens, "tandem.seconds": chunk.ended_at - chunk.planned_at}
        span.add_event("chunk", attributes, nanoseconds(origin + chunk.ended_at))
