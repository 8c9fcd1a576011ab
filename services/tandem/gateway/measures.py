"""Counts what a gateway answers, as its instruments name it; never keeps anything of a single answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tandem.core.clock import wall_ns
from tandem.core.errors import ERROR_TABLE, TandemError
from tandem.core.lane import Lane
from tandem.core.slo import Slo
from tandem.core.stages import Stage
from tandem.gateway.record import CANCELLED, FINISHED, AnswerRecord
from tandem.obs import instruments as have
from tandem.obs.metrics import OTHER, Buckets, Metrics
from tandem.sched.targets import NO_TARGETS, LatencyTargets, Target

OPERATIONS = {"chat": "chat", "completion": "text_completion"}
"""By endpoint, as OpenTelemetry's conventions call them."""
NO_PATH = "none"
"""The path of what found no place."""
_THEIRS = frozenset({CANCELLED, *(kind.value for kind, facts in ERROR_TABLE.items() if facts.http < 500)})
"""Outcomes that are no fault of ours."""
_STAGES = [stage.value for stage in Stage]


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


class Measures:
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
        self._moves = metrics.counter(have.MOVES)
        self._slo = metrics.counter(have.SLO_REQUESTS)
        self._gaps = metrics.histogram(have.INTER_TOKEN_LATENCY)
        self._promises = {lane.label: _promises(targets.lane(lane)) for lane in Lane}
        metrics.watch(have.SLO_TARGET, self._told_targets)

    def gaps(self, lane: Lane, model: str) -> Buckets:
        """Between tokens, for whoever sees them leave."""
        return self._gaps.of(lane.label, model)

    def responded(self, status: int) -> None:
        """An HTTP response was begun."""
        self._responses.add(1, str(status))

    def admitted(self, requests: Sequence[Admitted]) -> None:
        for lane, tenant in requests:
            self._admissions.add(1, "admitted", "", lane.label, tenant)

    def refused(self, lane: Lane, tenant: str, error: TandemError) -> None:
        """At the door, before any work."""
        self._admissions.add(1, "refused", error.reason or error.kind.value, lane.label, tenant)

    def begun(self, firsts: Sequence[FirstToken]) -> None:
        at = wall_ns() / 1e9
        for first in firsts:
            series = self._first_token.of(OPERATIONS[first.endpoint], first.model, first.tenant, first.lane.label)
            _record(series, first.after_s, first.trace, at)

    def answered(self, records: Sequence[AnswerRecord]) -> None:
        at = wall_ns() / 1e9
        for record in records:
            self._count(record, at)

    def _count(self, record: AnswerRecord, at: float) -> None:
        model, trace = record.model or OTHER, record.trace
        told = (OPERATIONS[record.endpoint], model, record.tenant, record.lane)
        is_finished = record.outcome == FINISHED
        self._requests.add(1, record.endpoint, record.outcome, record.lane, record.tenant)
        _record(self._duration.of(*told, "" if is_finished else record.outcome), record.total_s, trace, at)
        if is_finished and record.token_s is not None:
            _record(self._output_token.of(*told), record.token_s, trace, at)
        # Where it never was says nothing of how long others were there.
        for stage, seconds in zip(_STAGES, record.stages, strict=True):
            if seconds > 0:
                _record(self._stages.of(stage, record.lane, model), seconds, trace, at)
        self._count_tokens(record, told)
        if record.path:
            self._placements.add(1, record.path, record.reason)
        if record.num_attempts > 1:
            self._moves.add(record.num_attempts - 1)
        self._judge(record, is_finished)

    def _count_tokens(self, record: AnswerRecord, told: tuple[str, str, str, str]) -> None:
        usage, where = record.usage, (record.path or NO_PATH, record.tenant)
        if not usage.num_prompt:
            return
        self._prompt_tokens.add(usage.num_prompt, *where)
        self._cached_tokens.add(usage.num_cached or 0, *where)
        self._output_tokens.add(usage.num_output, *where)
        self._usage.of(*told, "input").record(usage.num_prompt)
        self._usage.of(*told, "output").record(usage.num_output)

    def _judge(self, record: AnswerRecord, is_finished: bool) -> None:
        """Whether its lane's promises were kept, as `core.slo` has it; what failed kept none."""
        if record.outcome in _THEIRS:
            return
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


def _promises(target: Target) -> list[tuple[str, Slo]]:
    """Each by itself, and all of them; none where nothing is promised."""
    whole = target.slo
    each = [("ttft", Slo(whole.ttft_s)), ("itl", Slo(itl_s=whole.itl_s))]
    kept = [(name, slo) for name, slo in each if slo != Slo()]
    return [*kept, ("both", whole)] if kept else []


def _record(series: Buckets, seconds: float, trace: str, at: float) -> None:
    if trace:
        series.record_traced(seconds, trace, at)
    else:
        series.record(seconds)
