"""What is noted of answers while they last, and the one record and span of each when it ends; never ends one and never
looks into a part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from tandem.core.clock import Clock, wall_ns
from tandem.core.errors import TandemError
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.telemetry.deferred import DeferredBatches, for_each
from tandem.gateway.telemetry.request_metrics import Admitted, FirstToken, RequestMetrics
from tandem.gateway.telemetry.request_record import CANCELLED, FINISHED, INTERNAL, RequestObserver, RequestRecord
from tandem.gateway.telemetry.root_span import SpanFacts, root_span
from tandem.gateway.telemetry.token_timing import TokenTiming
from tandem.gateway.telemetry.usage import UsageCounter
from tandem.obs.logs.log_context import traced
from tandem.obs.metrics.metrics import HistogramSeries
from tandem.obs.tracing.tracing import OFF, Trace, Tracing
from tandem.orchestration.phase_ledger import LedgerPhase, PhaseLedger, StageSeconds
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets


class RequestPath(Protocol):
    """How the request of one prompt went, or goes."""

    @property
    def path(self) -> str: ...

    @property
    def num_attempts(self) -> int: ...

    @property
    def workers(self) -> Sequence[str]: ...

    @property
    def reasons(self) -> Mapping[str, object]: ...


class RequestKind(NamedTuple):
    """What an answer is asked for by its body: `endpoint` as in records."""

    endpoint: str
    lane: Lane
    is_streamed: bool


class RequestTiming(NamedTuple):
    """For a client, in seconds: where the time went of an answer that took `total_s` until it was told."""

    total_s: float
    first_token_s: float | None
    stages: StageSeconds


class RequestEnd(NamedTuple):
    """How an answer ended, and when."""

    now: float
    error: BaseException | None
    tally: UsageCounter
    is_complete: bool


class SpanSource(NamedTuple):
    """What an answer's span is made of besides its record. `way` tells why it was placed so; None: it was not."""

    trace: Trace
    facts: SpanFacts
    way: RequestPath | None


class RequestRecorder:
    """Of all answers of a gateway. `measures` and `observers` are told of each that has ended: soon, and at once where
    none is open any more, because then nobody's tokens wait for it."""

    __slots__ = (
        "_conclude_each",
        "_deferred",
        "_observers",
        "_open",
        "_targets",
        "_trace",
        "clock",
        "measures",
        "tracing",
    )  # fmt: skip

    def __init__(
        self,
        clock: Clock,
        measures: RequestMetrics,
        tracing: Tracing = OFF,
        observers: Sequence[RequestObserver] = (),
        targets: LatencyTargets = NO_TARGETS,
    ) -> None:
        self.clock = clock
        self.measures = measures
        self.tracing = tracing
        self._deferred = DeferredBatches(clock.now)
        self._conclude_each, self._trace = for_each(_conclude), for_each(_trace)
        self._open: Counter[str] = Counter()
        self._observers = (measures, *observers)
        self._targets = targets

    @property
    def num_open(self) -> int:
        return self._open.copy().total()

    def num_open_of(self) -> Mapping[str, int]:
        """By tenant; not of those that have none open."""
        return self._open.copy()

    @contextmanager
    def admission(self, identity: str, asked: RequestKind, caller: RequestContext) -> Iterator[RequestRecording]:
        """The chronicle of an answer whose body was read. A refusal ends it here; what is admitted ends it itself."""
        self._open[caller.tenant.id] += 1
        recording = RequestRecording(self, identity, asked, caller, self._targets.lane(asked.lane).itl_s)
        try:
            yield recording
        except BaseException as error:
            recording.end(error, UsageCounter(1, recording.pace), is_complete=False)
            raise

    def admitted(self, request: Admitted) -> None:
        """One of an answer's requests was."""
        self._deferred.later(self.measures.admitted, request)

    def begun(self, first: FirstToken) -> None:
        """The first token of an answer left."""
        self._deferred.later(self.measures.begun, first)

    def close(self, recording: RequestRecording, ending: RequestEnd) -> None:
        """An answer is over: it is open no more, and all else about it can wait."""
        tenant = recording.tenant
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]
        self._deferred.later(self._conclude, (recording, ending))
        if not self._open:
            self._deferred.do()

    def notify(self, record: RequestRecord, span: SpanSource | None) -> None:
        """Whoever looks at it fails alone. `span`: None where it has none."""
        for observer in self._observers:
            self._deferred.later(observer.answered, record)
        if span is not None:
            self._deferred.later(self._trace, (record, span))

    def _conclude(self, ended: Sequence[tuple[RequestRecording, RequestEnd]]) -> None:
        """Of all of them first what takes longest, which in a row finds itself in the caches."""
        for recording, _ in ended:
            recording.pace.end()
        self._conclude_each(ended)


class RequestRecording:
    """Of one answer. `model` is the name of what is served, empty until it was found; `ways` has one for each prompt
    that was admitted, in order. `trace`: what of its trace is this process's."""

    __slots__ = (
        "_asked",
        "_began",
        "_caller",
        "_is_open",
        "_ledgers",
        "_max_tokens",
        "_recorder",
        "id",
        "model",
        "pace",
        "trace",
        "ways",
    )  # fmt: skip

    def __init__(
        self, recorder: RequestRecorder, identity: str, asked: RequestKind, caller: RequestContext, late_s: float
    ) -> None:
        self.id = identity
        self.model = ""
        self.ways: list[RequestPath] = []
        clock = recorder.clock
        self.pace = TokenTiming(clock.now, HistogramSeries(()), late_s, self._begun)
        self._began = wall_ns() / 1e9 - (clock.now() - caller.received_at)
        self.trace = recorder.tracing.begin(caller.traceparent, caller.tracestate)
        traced(self.trace.traceparent)
        self._recorder = recorder
        self._asked = asked
        self._caller = caller
        self._ledgers: list[PhaseLedger] = []
        self._max_tokens = 0
        self._is_open = True

    def set_model(self, model: str) -> None:
        """It is served, under this name."""
        self.model = model
        self.pace.gaps = self._recorder.measures.gaps(self._asked.lane, model)

    def ledger(self, max_tokens: int = 0) -> PhaseLedger:
        """Of the next prompt's request, which may draw so many tokens."""
        self._max_tokens = max_tokens
        self._ledgers.append(PhaseLedger(self._caller.received_at))
        return self._ledgers[-1]

    def admitted(self, request: Request, way: RequestPath) -> None:
        self.ways.append(way)
        self._recorder.admitted(Admitted(request.lane, self._caller.tenant.id))

    def refused(self, request: Request, error: TandemError) -> None:
        self._recorder.measures.refused(request.lane, self._caller.tenant.id, error)

    @property
    def timing(self) -> RequestTiming | None:
        """Up to now; None: nobody asked."""
        if not self._caller.wants_timing:
            return None
        now = self._recorder.clock.now()
        return RequestTiming(now - self._caller.received_at, self._first_token_s(), self._last(now)[1])

    def end(self, error: BaseException | None, tally: UsageCounter, *, is_complete: bool) -> None:
        """Once; a second time nothing happens."""
        if not self._is_open:
            return
        self._is_open = False
        now = self._recorder.clock.now()
        for ledger in self._ledgers:
            ledger.move(LedgerPhase.OVER, now)
        self._recorder.close(self, RequestEnd(now, error, tally, is_complete))

    def conclude(self, ending: RequestEnd) -> None:
        """Tell of it, once it and its pace have ended."""
        index, stages = self._last(ending.now)
        way = self.ways[index] if index < len(self.ways) else None
        record = self._record(ending, way, stages)
        span: SpanSource | None = None
        if self.trace.is_sampled:
            facts = SpanFacts(self._ledgers[index], self._max_tokens, ending.tally.reasons)
            span = SpanSource(self.trace, facts, way)
        self._recorder.notify(record, span)

    @property
    def tenant(self) -> str:
        return self._caller.tenant.id

    # ---- inside

    def _begun(self, now: float) -> None:
        asked, caller = self._asked, self._caller
        told = (asked.endpoint, self.model, caller.tenant.id, asked.lane, now - caller.received_at, self.trace.id)
        self._recorder.begun(FirstToken(*told))

    def _first_token_s(self) -> float | None:
        first_at = self.pace.first_at
        return None if first_at is None else first_at - self._caller.received_at

    def _last(self, now: float) -> tuple[int, StageSeconds]:
        """Which prompt's request ended last, or has not, as it waited least for others; and its stages."""
        if len(self._ledgers) == 1:
            return 0, self._ledgers[0].seconds(now)
        stages = [ledger.seconds(now) for ledger in self._ledgers or [self.ledger()]]
        index = min(range(len(stages)), key=lambda index: stages[index].deliver)
        return index, stages[index]

    def _record(self, ending: RequestEnd, way: RequestPath | None, stages: StageSeconds) -> RequestRecord:
        error = ending.error
        path, why = _path(way.path if way is not None else "")
        return RequestRecord(
            id=self.id,
            label=self._caller.request_id,
            trace=self.trace.id,
            traceparent=self.trace.traceparent,
            endpoint=self._asked.endpoint,
            model=self.model,
            tenant=self._caller.tenant.id,
            lane=self._asked.lane.label,
            outcome=_outcome(error, ending.is_complete),
            error=_message(error),
            path=path,
            reason=why if path else getattr(error, "reason", ""),
            num_attempts=max((way.num_attempts for way in self.ways), default=0),
            workers=() if way is None else tuple(way.workers),
            is_streamed=self._asked.is_streamed,
            usage=ending.tally.usage(),
            received_at=self._began,
            total_s=stages.total,
            first_token_s=self._first_token_s(),
            token_s=self.pace.mean_s,
            longest_gap_s=self.pace.longest_s,
            num_gaps=self.pace.num_gaps,
            num_late_gaps=self.pace.num_late,
            stages=stages,
        )


def _conclude(ended: tuple[RequestRecording, RequestEnd]) -> None:
    recording, ending = ended
    recording.conclude(ending)


def _trace(ended: tuple[RequestRecord, SpanSource]) -> None:
    record, (trace, facts, way) = ended
    trace.end(root_span(record, facts, {} if way is None else way.reasons))


def _path(told: str) -> tuple[str, str]:
    """The path and why it was taken, of what clients are told."""
    path, *facts = told.split(";")
    return path, next((fact.removeprefix("reason=") for fact in facts if fact.startswith("reason=")), "")


def _outcome(error: BaseException | None, is_complete: bool) -> str:
    match error:
        case TandemError():
            return error.kind.value
        case Exception():
            return INTERNAL
        case _:
            return FINISHED if is_complete else CANCELLED


def _message(error: BaseException | None) -> str:
    match error:
        case TandemError():
            return error.message
        case Exception():
            return repr(error)
        case _:
            return ""
