"""Counts what a gateway answers, as its instruments name it; never keeps anything of a single answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from tandem.core.clock import wall_ns
from tandem.core.errors import ERROR_TABLE, TandemError
from tandem.core.groups import group_by
from tandem.core.lane import Lane
from tandem.core.request_stages import Stage
from tandem.core.slo import Slo
from tandem.gateway.telemetry.request_record import CANCELLED, FINISHED, RequestRecord
from tandem.gateway.telemetry.usage import Usage
from tandem.obs.metrics import instruments as have
from tandem.obs.metrics.metrics import OTHER, Histogram, HistogramSeries, Metrics, Values
from tandem.sched.state.slo_targets import NO_TARGETS, LaneSlo, LatencyTargets

OPERATIONS = {"chat": "chat", "completion": "text_completion"}
"""By endpoint, as OpenTelemetry's conventions call them."""
NO_PATH = "none"
"""The path of what found no place."""
_THEIRS = frozenset({CANCELLED, *(kind.value for kind, facts in ERROR_TABLE.items() if facts.http < 500)})
"""Outcomes that are no fault of ours."""
_STAGES = [stage.value for stage in Stage]
_alike = attrgetter("endpoint", "model", "tenant", "lane", "outcome", "path", "reason")
"""Of a record: by these its series are known."""
_series_of = attrgetter("endpoint", "model", "tenant", "lane")
"""Of a first token."""


class Admitted(NamedTuple):
    lane: Lane
    tenant: str


class FirstToken(NamedTuple):
    """Of an answer: it left `after_s` after the request came. `trace` as in records."""

    endpoint: str
    model: str
    tenant: str
    lane: Lane
    after_s: float
    trace: str


class RequestMetrics:
    """An AnswerObserver. A model that is not served has no series of its own: clients can name any number of them."""

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
        self._promises = {lane.label: _promises(targets.lane(lane)) for lane in Lane}
        metrics.watch(have.SLO_TARGET, self._told_targets)

    def gaps(self, lane: Lane, model: str) -> HistogramSeries:
        """Between tokens, for whoever sees them leave."""
        return self._gaps.of(lane.label, model)

    def responded(self, status: int) -> None:
        """An HTTP response was begun."""
        self._responses.add(1, str(status))

    def admitted(self, requests: Sequence[Admitted]) -> None:
        for (lane, tenant), number in Counter(requests).items():
            self._admissions.add(number, "admitted", "", lane.label, tenant)

    def refused(self, lane: Lane, tenant: str, error: TandemError) -> None:
        """At the door, before any work."""
        self._admissions.add(1, "refused", error.reason or error.kind.value, lane.label, tenant)

    def begun(self, firsts: Sequence[FirstToken]) -> None:
        at = wall_ns() / 1e9
        for told, some in group_by(firsts, _series_of).items():
            endpoint, model, tenant, lane = told
            series = self._first_token.of(OPERATIONS[endpoint], model, tenant, lane.label)
            series.record_all([first.after_s for first in some], [first.trace for first in some], at)

    def answered(self, records: Sequence[RequestRecord]) -> None:
        at = wall_ns() / 1e9
        for alike in group_by(records, _alike).values():
            self._count(alike, at)
            for record in alike:
                if record.num_attempts > 1:
                    self._retries.add(record.num_attempts - 1)
                self._count_slo(record)

    def _count(self, alike: Sequence[RequestRecord], at: float) -> None:
        """Those that are in the same series, each of which is then looked for once."""
        one = alike[0]
        model, traces = one.model or OTHER, [record.trace for record in alike]
        told = (OPERATIONS[one.endpoint], model, one.tenant, one.lane)
        is_finished = one.outcome == FINISHED
        self._requests.add(len(alike), one.endpoint, one.outcome, one.lane, one.tenant)
        durations = self._duration.of(*told, "" if is_finished else one.outcome)
        durations.record_all([record.total_s for record in alike], traces, at)
        if is_finished:
            _record_all(self._output_token, told, [record.token_s or 0.0 for record in alike], traces, at)
        for stage, seconds in zip(_STAGES, zip(*(record.stages for record in alike), strict=True), strict=True):
            _record_all(self._stages, (stage, one.lane, model), seconds, traces, at)
        self._count_tokens([record.usage for record in alike], one, told)
        if one.path:
            self._placements.add(len(alike), one.path, one.reason)

    def _count_tokens(self, usages: Sequence[Usage], one: RequestRecord, told: Values) -> None:
        counted = [usage for usage in usages if usage.num_prompt]
        if not counted:
            return
        where = (one.path or NO_PATH, one.tenant)
        prompts, outputs = [usage.num_prompt for usage in counted], [usage.num_output for usage in counted]
        self._prompt_tokens.add(sum(prompts), *where)
        self._cached_tokens.add(sum(usage.num_cached or 0 for usage in counted), *where)
        self._output_tokens.add(sum(outputs), *where)
        self._usage.of(*told, "input").record_sorted(sorted(prompts))
        self._usage.of(*told, "output").record_sorted(sorted(outputs))

    def _count_slo(self, record: RequestRecord) -> None:
        """Whether its lane's promises were kept, as `core.slo` has it; what failed kept none."""
        if record.outcome in _THEIRS:
            return
        is_finished = record.outcome == FINISHED
        # One that had no token to wait for was not late.
        first_s = (record.first_token_s or 0.0) if is_finished else None
        for name, slo in self._promises[record.lane]:
            met = slo.is_met(first_s, record.num_late_gaps if slo.itl_s is not None else 0, record.num_gaps)
            self._slo.add(1, record.lane, name, "true" if met else "false")

    def _told_targets(self) -> Mapping[tuple[str, ...], float]:
        return {
            (lane, name): slo.ttft_s or slo.itl_s or 0.0
            for lane, promises in self._promises.items()
            for name, slo in promises
            if name != "both"
        }


def _promises(target: LaneSlo) -> list[tuple[str, Slo]]:
    """Each by itself, and all of them; none where nothing is promised."""
    whole = target.slo
    each = [("ttft", Slo(whole.ttft_s)), ("itl", Slo(itl_s=whole.itl_s))]
    kept = [(name, slo) for name, slo in each if slo != Slo()]
    return [*kept, ("both", whole)] if kept else []


def _record_all(histogram: Histogram, told: Values, seconds: Sequence[float], traces: Sequence[str], at: float) -> None:
    """Those that are more than none: where it never was says nothing of how long others were there."""
    if min(seconds) <= 0:
        there = [(each, trace) for each, trace in zip(seconds, traces, strict=True) if each > 0]
        seconds, traces = [each for each, _ in there], [trace for _, trace in there]
    if seconds:
        histogram.of(*told).record_all(seconds, traces, at)
