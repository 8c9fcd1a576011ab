"""Follow each open request, and make its one record and one span when it ends.

Observers, metrics and spans get their data later and for many requests together (`deferred`), because tokens of other
requests wait for the event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from opentelemetry.trace import Tracer

from tandem.core.clock import Clock, wall_ns
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Pauses, merged_yields
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.gateway.context.interfaces import TokenStream
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.telemetry.deferred import DeferredCalls
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.gateway.telemetry.request_record import (
    CANCELLED,
    FINISHED,
    INTERNAL,
    MAX_ERROR_CHARS,
    RequestObserver,
    RequestRecord,
)
from tandem.gateway.telemetry.root_span import SpanFacts, end_root_span
from tandem.gateway.telemetry.token_timing import TokenTiming
from tandem.gateway.telemetry.usage import UsageCounter
from tandem.obs.logs.log_context import traced
from tandem.obs.metrics.metrics import HistogramSeries
from tandem.obs.tracing import OFF, begin_trace
from tandem.orchestration.phase_ledger import LedgerPhase, PhaseLedger, StageSeconds
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets

_DEADLINE_SLACK_S = 0.1
"""A disconnect counts as the client's deadline from this many seconds before the deadline on: the gateway counts the
time to the deadline from the arrival of the request, so that the client's own timer fires first."""

_REFUSALS = (429, 503)
"""HTTP statuses of errors by which an admission is refused, besides those whose `reason` names a limit."""


class RequestKind(NamedTuple):
    """Kind of a request by its body: `endpoint` is "chat" or "completion", `is_streamed` whether the response is a
    stream."""

    endpoint: str
    lane: Lane
    is_streamed: bool


class RequestTiming(NamedTuple):
    """Hold the times of a request as its client sees them, in seconds.

    `total_s`: from its arrival until now. `first_token_s`: from its arrival until the first token was sent; None before
    that. `stages`: seconds of each stage until now; with several prompts, those of the prompt that ended last or is
    still open.
    """

    total_s: float
    first_token_s: float | None
    stages: StageSeconds


class RequestRecorder:
    """Follow the open requests of a gateway, and pass the record of each ended one to `measures` and `observers`.

    Records are passed on within a second, or immediately where no request is open any more. `targets`: the latency
    targets by lane, beyond which the time between two tokens counts as late."""

    def __init__(
        self,
        clock: Clock,
        measures: RequestMetrics,
        tracer: Tracer = OFF,
        observers: Sequence[RequestObserver] = (),
        targets: LatencyTargets = NO_TARGETS,
    ) -> None:
        self.clock = clock
        self.measures = measures
        self.tracer = tracer
        self._deferred = DeferredCalls()
        self.later = self._deferred.later
        self._open: Counter[str] = Counter()
        self._observers = (measures, *observers)
        self._targets = targets

    @property
    def num_open(self) -> int:
        """Return the number of open requests; may be called on any thread."""
        return self._open.copy().total()

    def num_open_by_tenant(self) -> Mapping[str, int]:
        """Return the number of open requests by tenant; tenants without any have no entry."""
        return self._open.copy()

    @contextmanager
    def admission(self, identity: str, kind: RequestKind, caller: RequestContext) -> Iterator[RequestRecording]:
        """Begin the recording of a request whose body was read, and yield the recording.

        `identity`: the gateway's own id of the request. An exception inside the `with` block ends the recording with
        that error, and counts as a refusal where a limit or a lack of capacity is the reason. Otherwise the recording
        stays open until the caller calls its `end`.
        """
        self._open[caller.tenant.id] += 1
        recording = RequestRecording(self, identity, kind, caller, self._targets.lane(kind.lane).itl_s or 0.0)
        try:
            yield recording
        except BaseException as error:
            if isinstance(error, TandemError) and (error.reason or error.kind.http in _REFUSALS):
                self.measures.refused(kind.lane, caller.tenant.id, error)
            recording.end(error, UsageCounter(1, recording.pace), is_complete=False)
            raise

    def close(self, tenant: str, conclude: Callable[[], None]) -> None:
        """Remove a request of the tenant named `tenant` from the open ones, and enqueue `conclude`, which builds the
        request's record, as a deferred call."""
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]
        self.later(conclude)
        if not self._open:
            self._deferred.do()

    def notify(self, record: RequestRecord) -> None:
        """Pass a record to every observer by a deferred call; an observer that raises does not affect the others."""
        for observer in self._observers:
            self.later(partial(observer.answered, record))


class RequestRecording:
    """Collect what happens to one open request, and build its record and trace span at its end.

    `model`: the served name; empty until it is known. `placements`: the output streams of its admitted prompts, in
    order. `ledgers`: the times and preemptions of its prompts, in order. `trace`: this process's part of the request's
    trace. `pace`: the send times of its tokens."""

    def __init__(
        self, recorder: RequestRecorder, identity: str, kind: RequestKind, caller: RequestContext, late_s: float
    ) -> None:
        self.id = identity
        self.model = ""
        self.placements: list[TokenStream] = []
        clock = recorder.clock
        self.pace = TokenTiming(clock.now, HistogramSeries(()), late_s, self._begun)
        self._began = wall_ns() / 1e9 - (clock.now() - caller.received_at)
        headers = caller.traceparent, caller.tracestate
        self.trace = begin_trace(recorder.tracer, kind.endpoint, self._began, *headers)
        traced(self.trace.traceparent)
        self._recorder = recorder
        self._kind = kind
        self._caller = caller
        self.ledgers: list[PhaseLedger] = []
        self._max_tokens = 0
        self._is_open = True

    def set_model(self, model: str) -> None:
        """Set the name under which the model is served, and count the times between tokens under it."""
        self.model = model
        self.pace.gaps = self._recorder.measures.gaps(self._kind.lane, model)

    def ledger(self, max_tokens: int = 0) -> PhaseLedger:
        """Return a new ledger for the times of the next prompt, which may sample at most `max_tokens` tokens."""
        self._max_tokens = max_tokens
        self.ledgers.append(PhaseLedger(self._caller.received_at))
        return self.ledgers[-1]

    def admitted(self, request: Request, placement: TokenStream) -> None:
        self.placements.append(placement)
        recorder = self._recorder
        recorder.later(partial(recorder.measures.admitted, request.lane, self._caller.tenant.id))

    @property
    def timing(self) -> RequestTiming | None:
        """Return the times up to now; None where the client did not request them."""
        if not self._caller.include_timing:
            return None
        now = self._recorder.clock.now()
        return RequestTiming(now - self._caller.received_at, self._first_token_s(), self._last(now)[1])

    def end(self, error: BaseException | None, tally: UsageCounter, *, is_complete: bool) -> None:
        """End the recording with the request's result; a second call does nothing.

        `error`: what ended the request, None where nothing was raised. `tally`: the tokens of the response.
        `is_complete`: whether all output was sent. If it was not and there is no error, the client has gone: the
        outcome is "cancelled", or "deadline_exceeded" from the client's deadline on."""
        if not self._is_open:
            return
        self._is_open = False
        now = self._recorder.clock.now()
        for ledger in self.ledgers:
            ledger.move(LedgerPhase.OVER, now)
        self._recorder.close(self._caller.tenant.id, partial(self._conclude, now, error, tally, is_complete))

    # ---- inside

    def _begun(self, now: float) -> None:
        kind, caller = self._kind, self._caller
        values = (kind.endpoint, self.model, caller.tenant.id, kind.lane, now - caller.received_at, self.trace.id)
        self._recorder.later(partial(self._recorder.measures.begun, *values))

    def _first_token_s(self) -> float | None:
        first_at = self.pace.first_at
        return None if first_at is None else first_at - self._caller.received_at

    def _last(self, now: float) -> tuple[int, StageSeconds]:
        """Return the index of the prompt whose request ended last or is still open, and its stages. That request spent
        the least time in stage `deliver`, where it waits for the other prompts."""
        if len(self.ledgers) == 1:
            return 0, self.ledgers[0].seconds(now)
        stages = [ledger.seconds(now) for ledger in self.ledgers or [self.ledger()]]
        index = min(range(len(stages)), key=lambda index: stages[index].deliver)
        return index, stages[index]

    def _conclude(self, now: float, error: BaseException | None, tally: UsageCounter, is_complete: bool) -> None:
        """Make the record and the span and pass them on; called after `end`, with its arguments and its time."""
        self.pace.end()
        index, stages = self._last(now)
        placement = self.placements[index] if index < len(self.placements) else None
        outcome, message = self._outcome(now, error, is_complete)
        path, why = _path(placement.path if placement is not None else "")
        record = RequestRecord(
            id=self.id,
            label=self._caller.request_id,
            trace=self.trace.id,
            traceparent=self.trace.traceparent,
            endpoint=self._kind.endpoint,
            model=self.model,
            tenant=self._caller.tenant.id,
            lane=self._kind.lane.label,
            outcome=outcome,
            error=message[:MAX_ERROR_CHARS],
            path=path,
            reason=why if path else getattr(error, "reason", ""),
            num_attempts=max((each.num_attempts for each in self.placements), default=0),
            num_retries=sum(each.num_attempts - 1 for each in self.placements),
            pauses=Pauses.sum(ledger.pauses for ledger in self.ledgers),
            yields=merged_yields(part for ledger in self.ledgers for part in ledger.yields),
            workers=() if placement is None else tuple(placement.workers),
            is_streamed=self._kind.is_streamed,
            usage=tally.usage(),
            received_at=self._began,
            total_s=stages.total,
            first_token_s=self._first_token_s(),
            token_s=self.pace.mean_s,
            longest_gap_s=self.pace.longest_s,
            num_gaps=self.pace.num_gaps,
            num_late_gaps=self.pace.num_late,
            stages=stages,
        )
        self._recorder.notify(record)
        if self.trace.span.is_recording():
            facts = SpanFacts(self.ledgers[index], self._max_tokens, tally.reasons)
            reasons = {} if placement is None else placement.reasons
            end_root_span(self.trace.span, self._recorder.tracer, record, facts, reasons)

    def _outcome(self, now: float, error: BaseException | None, is_complete: bool) -> tuple[str, str]:
        """Return the outcome of the request, which ended at `now`, and the message of its error, which may be empty."""
        caller = self._caller
        match error:
            case TandemError():
                return error.kind.value, error.message
            case Exception():
                return INTERNAL, repr(error)
            case _ if is_complete:
                return FINISHED, ""
            case _ if caller.timeout_s is not None and now - caller.received_at >= caller.timeout_s - _DEADLINE_SLACK_S:
                return ErrorKind.DEADLINE.value, "the client disconnected at its deadline"
            case _:
                return CANCELLED, ""


def _path(text: str) -> tuple[str, str]:
    """Split `path;reason=...` as clients receive it into the path and its reason, which may be empty."""
    path, *facts = text.split(";")
    return path, next((fact.removeprefix("reason=") for fact in facts if fact.startswith("reason=")), "")
