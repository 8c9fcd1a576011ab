"""Count the steps of an engine, the jobs that have ended, and what these jobs read from other workers."""

from __future__ import annotations

from tandem.core.request import ResumeJob
from tandem.engine.job_timeline import JobTimes, PullTimes
from tandem.obs.metrics import instruments as on
from tandem.obs.metrics.metrics import Metrics
from tandem.sched.state.schedule_result import StepRecord

KINDS = ("decode", "prefill", "mixed")
"""Label values for what a step computed: index 0 decodes only, 1 prefill tokens only, 2 both."""


class StepMetrics:
    """Count steps, their durations and tokens, as a `StepObserver` of the engine. `observe` runs on the engine's thread
    and costs about ten additions per step."""

    def __init__(self, metrics: Metrics) -> None:
        steps = metrics.counter(on.STEPS)
        durations, predicted = metrics.histogram(on.STEP_DURATION), metrics.histogram(on.STEP_PREDICTED_DURATION)
        # All kinds are exported from the start, so that a rate has a first value.
        self._kinds = tuple((steps.of(kind), durations.of(kind), predicted.of(kind)) for kind in KINDS)
        self._num_prefill_tokens = metrics.counter(on.STEP_PREFILL_TOKENS).of()
        self._num_decode_tokens = metrics.counter(on.STEP_DECODE_TOKENS).of()
        self._num_budget_tokens = metrics.counter(on.STEP_BUDGET_TOKENS).of()
        self._num_saturated = metrics.counter(on.STEPS_SATURATED).of()
        self._num_over_target = metrics.counter(on.STEPS_OVER_TARGET).of()
        self._num_preempted = metrics.counter(on.PREEMPTIONS).of()
        self._num_yielded = metrics.counter(on.LANE_PREEMPTIONS).of()

    def observe(self, record: StepRecord) -> None:
        features = record.features
        num_prefill, num_decode = features.num_prefill_tokens - record.num_drafted, features.num_decode_seqs
        steps, durations, predicted = self._kinds[0 if not num_prefill else 2 if num_decode else 1]
        steps.value += 1
        durations.record(record.measured_s)
        predicted.record(record.predicted_s)
        self._num_prefill_tokens.value += num_prefill
        self._num_decode_tokens.value += num_decode
        self._num_budget_tokens.value += record.num_budget_tokens
        self._num_saturated.value += 0 < record.num_budget_tokens <= num_prefill
        self._num_over_target.value += record.is_planned_over_target
        self._num_preempted.value += record.num_preempted
        self._num_yielded.value += record.num_yielded

    def __repr__(self) -> str:
        counted = ", ".join(f"{cells[0].value:g} {kind}" for kind, cells in zip(KINDS, self._kinds, strict=True))
        return f"<steps: {counted}>"


class JobMetrics:
    """Count ended jobs, their time in the queue, cached tokens and transfers.

    Must be called by one thread only. `transport`: kind of transport by which this worker reads KV, as label value.
    """

    def __init__(self, metrics: Metrics, transport: str) -> None:
        self._transport = transport
        self._jobs = metrics.counter(on.JOBS)
        self._queue = metrics.histogram(on.JOB_QUEUE_DURATION)
        self._num_queried = metrics.counter(on.PREFIX_QUERIED_TOKENS).of()
        self._num_hits = metrics.counter(on.PREFIX_HIT_TOKENS).of()
        self._transfers = metrics.counter(on.TRANSFERS)
        self._bytes = metrics.counter(on.TRANSFER_BYTES)
        self._exposed_bytes = metrics.counter(on.TRANSFER_EXPOSED_BYTES)
        self._busy = metrics.counter(on.TRANSFER_BUSY)
        self._durations = metrics.histogram(on.TRANSFER_DURATION)
        self._exposed_durations = metrics.histogram(on.TRANSFER_EXPOSED_DURATION)

    def count(self, times: JobTimes) -> None:
        self._jobs.add(1, times.kind, times.outcome)
        if times.started_at is not None and times.ready_at is not None:
            self._queue.of(times.kind).record(times.started_at - times.ready_at)
            if not isinstance(times.job, ResumeJob):
                self._num_queried.value += times.job.num_known_tokens
                self._num_hits.value += times.num_cached
        if times.pull is not None:
            self._count_pull(times.pull)

    def _count_pull(self, pull: PullTimes) -> None:
        kind, transport = pull.kind, self._transport
        self._transfers.add(1, kind, pull.outcome)
        if not pull.num_blocks:
            return
        self._bytes.add(pull.num_bytes, kind, transport)
        self._exposed_bytes.add(pull.num_exposed_bytes, kind, transport)
        self._busy.add(pull.busy_s, kind, transport)
        if pull.outcome == "done":
            self._durations.of(kind).record(pull.ready_at - pull.first_announced_at)
            self._exposed_durations.of(kind).record(pull.exposed_s)
