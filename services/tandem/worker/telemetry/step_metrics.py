"""Count the steps of an engine and what they computed."""

from __future__ import annotations

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
