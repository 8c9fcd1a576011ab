"""Count the gateway's requests in its metrics: latency, tokens, outcomes, admissions and latency targets."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.core.clock import wall_ns
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.lane import Lane
from tandem.core.request_stages import Stage
from tandem.core.slo import Slo
from tandem.gateway.telemetry.request_record import CANCELLED, FINISHED, RequestRecord
from tandem.obs.metrics import instruments as have
from tandem.obs.metrics.metrics import OTHER, HistogramSeries, Metrics
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets

OPERATIONS = {"chat": "chat", "completion": "text_completion"}
"""Operation names of OpenTelemetry's conventions, by the endpoint of a RequestRecord."""
NO_PATH = "none"
"""Value of the attribute `path` for requests that were never placed on workers."""
_THEIRS = frozenset({CANCELLED, *(kind.value for kind in ErrorKind if kind.http < 500)})
"""Outcomes that are the client's doing; they count neither for nor against a latency target."""


class RequestMetrics:
    """Record requests in the gateway's metrics: counts, durations, tokens and latency targets; an observer of records.

    `targets` are the latency targets by lane. Requests for models that are not served share one series, because clients
    can name any number of them."""

    def __init__(self, metrics: Metrics, targets: LatencyTargets = NO_TARGETS) -> None:
        self._first_token = metrics.histogram(have.TIME_TO_FIRST_TOKEN)
        self._output_token = metrics.histogram(have.TIME_PER_OUTPUT_TOKEN)
        self._duration = metrics.histogram(have.REQUEST_DURATION)
        self._usage = metrics.histogram(have.TOKEN_USAGE)
        self._stages = metrics.histogram(have.STAGE_DURATION)
        self._requests = metrics.counter(have.REQUESTS)
        self._responses = metrics.counter(have.HTTP_RESPONSES)
        self._prompt_tokens = metrics.counter(have.PROMPT_TOKENS)
        self._cached_tokens = metrics.counter(have.CACHED_PROMPT_TOKENS)
        self._output_tokens = metrics.counter(have.OUTPUT_TOKENS)
        self._admissions = metrics.counter(have.ADMISSIONS)
        self._placements = metrics.counter(have.PLACEMENTS)
        self._retries = metrics.counter(have.RETRIES)
        self._slo = metrics.counter(have.SLO_REQUESTS)
        self._gaps = metrics.histogram(have.INTER_TOKEN_LATENCY)
        self._slos = {lane.label: _slos(targets.lane(lane)) for lane in Lane}
        metrics.watch(have.SLO_TARGET, self._target_series)

    def gaps(self, lane: Lane, model: str) -> HistogramSeries:
        """Return the histogram series for the times between two tokens of requests of this lane and model."""
        return self._gaps.of(lane.label, model)

    def responded(self, status: int) -> None:
        """Count an HTTP response by its status code; called when its head is sent."""
        self._responses.add(1, str(status))

    def admitted(self, lane: Lane, tenant: str) -> None:
        self._admissions.add(1, "admitted", "", lane.label, tenant)

    def refused(self, lane: Lane, tenant: str, error: TandemError) -> None:
        """Count a request that was refused at admission with `error`."""
        self._admissions.add(1, "refused", error.reason or error.kind.value, lane.label, tenant)

    def crowded(self) -> None:
        """Count a request that was refused because too many connections or calls were open, before its lane and its
        tenant were known."""
        self._admissions.add(1, "refused", "connections", "", "")

    def begun(self, endpoint: str, model: str, tenant: str, lane: Lane, after_s: float, trace: str) -> None:
        """Record the first token of a request, sent to the client `after_s` seconds after the request was received.

        `endpoint`: "chat" or "completion". `trace`: hexadecimal id of the request's trace; empty where the trace is not
        sampled."""
        series = self._first_token.of(OPERATIONS[endpoint], model, tenant, lane.label)
        series.record_traced(after_s, trace, wall_ns() / 1e9)

    def answered(self, record: RequestRecord) -> None:
        self._count(record)
        self._count_tokens(record)
        self._count_slo(record)

    def _count(self, record: RequestRecord) -> None:
        """Count a record's outcome, path and durations. A stage of 0 s is left out, because the request skipped it; but
        a placed request that found room at once waited 0 s in the queue."""
        at = wall_ns() / 1e9
        model, trace, is_finished = record.model or OTHER, record.trace, record.outcome == FINISHED
        values = (OPERATIONS[record.endpoint], model, record.tenant, record.lane)
        self._requests.add(1, record.endpoint, record.outcome, record.lane, record.tenant)
        error = "" if is_finished else record.outcome
        self._duration.of(*values, error).record_traced(record.total_s, trace, at)
        if is_finished and record.token_s:
            self._output_token.of(*values).record_traced(record.token_s, trace, at)
        for stage, seconds in zip(Stage, record.stages, strict=True):
            if seconds > 0 or (stage is Stage.QUEUE and record.path):
                self._stages.of(stage.value, record.lane, model).record_traced(seconds, trace, at)
        if record.path:
            self._placements.add(1, record.path, record.reason)
        if record.num_retries:
            self._retries.add(record.num_retries)

    def _count_tokens(self, record: RequestRecord) -> None:
        usage = record.usage
        if not usage.num_prompt:
            return
        path_and_tenant = (record.path or NO_PATH, record.tenant)
        self._prompt_tokens.add(usage.num_prompt, *path_and_tenant)
        self._cached_tokens.add(usage.num_cached or 0, *path_and_tenant)
        self._output_tokens.add(usage.num_output, *path_and_tenant)
        values = (OPERATIONS[record.endpoint], record.model or OTHER, record.tenant, record.lane)
        self._usage.of(*values, "input").record(usage.num_prompt)
        self._usage.of(*values, "output").record(usage.num_output)

    def _count_slo(self, record: RequestRecord) -> None:
        """Count whether a request met the targets of its lane, by the rule of `core.slo`; a failed request met none."""
        if record.outcome in _THEIRS:
            return
        is_finished = record.outcome == FINISHED
        # A finished request without any token was not late.
        first_s = (record.first_token_s or 0.0) if is_finished else None
        for name, slo in self._slos[record.lane]:
            met = slo.is_met(first_s, record.num_late_gaps if slo.itl_s is not None else 0, record.num_gaps)
            self._slo.add(1, record.lane, name, "true" if met else "false")

    def _target_series(self) -> Mapping[tuple[str, ...], float]:
        return {
            (lane, name): slo.ttft_s or slo.itl_s or 0.0
            for lane, slos in self._slos.items()
            for name, slo in slos
            if name != "both"
        }


def _slos(whole: Slo) -> list[tuple[str, Slo]]:
    """List the targets of a lane one by one and then all together as "both"; empty where the lane has no target."""
    single = [("ttft", Slo(whole.ttft_s)), ("itl", Slo(itl_s=whole.itl_s))]
    required = [(name, slo) for name, slo in single if slo != Slo()]
    return [*required, ("both", whole)] if required else []
