"""Count the gateway's requests in its metrics: latency, tokens, outcomes, admissions and latency targets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from tandem.core.clock import wall_ns
from tandem.core.errors import ERROR_TABLE, TandemError
from tandem.core.lane import Lane
from tandem.core.request_stages import Stage
from tandem.core.slo import Slo
from tandem.gateway.telemetry.request_record import CANCELLED, FINISHED, RequestRecord
from tandem.gateway.telemetry.usage import Usage
from tandem.obs.metrics import instruments as have
from tandem.obs.metrics.metrics import OTHER, Histogram, HistogramSeries, Metrics, Values
from tandem.sched.state.slo_targets import NO_TARGETS, LaneSlo, LatencyTargets

OPERATIONS = {"chat": "chat", "completion": "text_completion"}
"""Operation names of OpenTelemetry's conventions by endpoint."""
NO_PATH = "none"
"""Path attribute of requests that were never placed."""
_THEIRS = frozenset({CANCELLED, *(kind.value for kind, facts in ERROR_TABLE.items() if facts.http < 500)})
"""Outcomes that are the client's doing; they count neither for nor against a latency target."""
_STAGES = [stage.value for stage in Stage]
_alike = attrgetter("endpoint", "model", "tenant", "lane", "outcome", "path", "reason")
"""Returns the values of a RequestRecord that determine its series."""
_series_of = attrgetter("endpoint", "model", "tenant", "lane")
"""Returns the values of a FirstToken that determine its series."""


class Admitted(NamedTuple):
    lane: Lane
    tenant: str


class FirstToken(NamedTuple):
    """First token of a request, sent `after_s` seconds after the request was received. `trace` as in RequestRecord."""

    endpoint: str
    model: str
    tenant: str
    lane: Lane
    after_s: float
    trace: str


class RequestMetrics:
    """RequestObserver that records requests in the gateway's instruments.

    Models that are not served share one series, because clients can name any number of them."""

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
        """Return the series of the gaps between tokens of one lane and model."""
        return self._gaps.of(lane.label, model)

    def responded(self, status: int) -> None:
        """Count an HTTP response by its status; called when its head is sent."""
        self._responses.add(1, str(status))

    def admitted(self, requests: Sequence[Admitted]) -> None:
        for (lane, tenant), number in Counter(requests).items():
            self._admissions.add(number, "admitted", "", lane.label, tenant)

    def refused(self, lane: Lane, tenant: str, error: TandemError) -> None:
        """Count a request that was refused at admission."""
        self._admissions.add(1, "refused", error.reason or error.kind.value, lane.label, tenant)

    def begun(self, firsts: Sequence[FirstToken]) -> None:
        at = wall_ns() / 1e9
        groups: defaultdict[tuple[str, str, str, Lane], list[FirstToken]] = defaultdict(list)
        for first in firsts:
            groups[_series_of(first)].append(first)
        for values, group in groups.items():
            endpoint, model, tenant, lane = values
            series = self._first_token.of(OPERATIONS[endpoint], model, tenant, lane.label)
            series.record_all([first.after_s for first in group], [first.trace for first in group], at)

    def answered(self, records: Sequence[RequestRecord]) -> None:
        at = wall_ns() / 1e9
        groups: defaultdict[tuple[object, ...], list[RequestRecord]] = defaultdict(list)
        for record in records:
            groups[_alike(record)].append(record)
        for alike in groups.values():
            self._count(alike, at)
            for record in alike:
                if record.num_attempts > 1:
                    self._retries.add(record.num_attempts - 1)
                self._count_slo(record)

    def _count(self, alike: Sequence[RequestRecord], at: float) -> None:
        """Count records that belong to the same series, so that each series is looked up once."""
        first = alike[0]
        model, traces = first.model or OTHER, [record.trace for record in alike]
        values = (OPERATIONS[first.endpoint], model, first.tenant, first.lane)
        is_finished = first.outcome == FINISHED
        self._requests.add(len(alike), first.endpoint, first.outcome, first.lane, first.tenant)
        durations = self._duration.of(*values, "" if is_finished else first.outcome)
        durations.record_all([record.total_s for record in alike], traces, at)
        if is_finished:
            _record_all(self._output_token, values, [record.token_s or 0.0 for record in alike], traces, at)
        for stage, seconds in zip(_STAGES, zip(*(record.stages for record in alike), strict=True), strict=True):
            _record_all(self._stages, (stage, first.lane, model), seconds, traces, at)
        self._count_tokens([record.usage for record in alike], first, values)
        if first.path:
            self._placements.add(len(alike), first.path, first.reason)

    def _count_tokens(self, usages: Sequence[Usage], first: RequestRecord, values: Values) -> None:
        counted = [usage for usage in usages if usage.num_prompt]
        if not counted:
            return
        path_and_tenant = (first.path or NO_PATH, first.tenant)
        prompts, outputs = [usage.num_prompt for usage in counted], [usage.num_output for usage in counted]
        self._prompt_tokens.add(sum(prompts), *path_and_tenant)
        self._cached_tokens.add(sum(usage.num_cached or 0 for usage in counted), *path_and_tenant)
        self._output_tokens.add(sum(outputs), *path_and_tenant)
        self._usage.of(*values, "input").record_sorted(sorted(prompts))
        self._usage.of(*values, "output").record_sorted(sorted(outputs))

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


def _slos(target: LaneSlo) -> list[tuple[str, Slo]]:
    """List the targets of a lane one by one and then all together as "both"; empty where the lane has no target."""
    whole = target.slo
    single = [("ttft", Slo(whole.ttft_s)), ("itl", Slo(itl_s=whole.itl_s))]
    required = [(name, slo) for name, slo in single if slo != Slo()]
    return [*required, ("both", whole)] if required else []


def _record_all(
    histogram: Histogram, values: Values, seconds: Sequence[float], traces: Sequence[str], at: float
) -> None:
    """Record the durations above 0: a request that skipped a stage says nothing about how long the stage takes."""
    if min(seconds) <= 0:
        positive = [(duration, trace) for duration, trace in zip(seconds, traces, strict=True) if duration > 0]
        seconds, traces = [duration for duration, _ in positive], [trace for _, trace in positive]
    if seconds:
        histogram.of(*values).record_all(seconds, traces, at)
