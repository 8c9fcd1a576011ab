"""Runs the lives of all requests of this gateway at its workers; never decides anything about one.

What happens to a request is `flow.lifecycle`, where it goes is `routing.router`; here their commands are carried out
and what comes back is fed to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from functools import partial

from tandem.admission.request_queue import RequestQueue
from tandem.core.clock import Clock
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, JobEvent, Token
from tandem.core.ids import HandoffId, JobKey, RequestId, TenantId, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import Job, Request
from tandem.flow.commands import (
    CancelJob,
    Command,
    Deliver,
    DeliverPromptLogprobs,
    EndChoice,
    EndRequest,
    FindConsumer,
    ReleaseLease,
    ReportWorkerFailure,
    Requeue,
    Submit,
)
from tandem.flow.job_group import JobGroupPhase
from tandem.flow.phase_ledger import LedgerPhase, PhaseLedger
from tandem.flow.request_queue import PlacementQueue
from tandem.flow.request_state import RequestState
from tandem.gateway.context.interfaces import NO_PREFIXES, KnownPrefixes, Quotas, ScrapeTarget, ServedModel
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.context.supervise import log_and_continue
from tandem.gateway.orchestration.active_request import ActiveRequest
from tandem.gateway.orchestration.admission import AdmissionController
from tandem.gateway.orchestration.deadlines import timeout_error
from tandem.gateway.orchestration.demand import DemandCounter
from tandem.gateway.orchestration.feedback import RoutingFeedback
from tandem.gateway.orchestration.pair_probe import has_moved, probe_request
from tandem.gateway.workers.worker_pool import WorkerPool
from tandem.obs.logs.log_formatters import OF_ANOTHER
from tandem.routing.circuit_breaker import BreakerState
from tandem.routing.placement import Placement
from tandem.routing.worker_view import WorkerView
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets

log = logging.getLogger(__name__)
TICK_S = 0.05


class Dispatcher:
    """The one Dispatch of a gateway. All of it runs on one event loop."""

    def __init__(
        self,
        fleet: WorkerPool,
        config: GatewayConfig,
        clock: Clock,
        quotas: Quotas,
        targets: LatencyTargets = NO_TARGETS,
        prefixes: KnownPrefixes = NO_PREFIXES,
    ) -> None:
        self._fleet = fleet
        # Of the Dispatch port.
        self.num_live, self.problem = fleet.num_live, fleet.pairs.problem
        self._config = config
        self._clock = clock
        self._waiting = PlacementQueue(fleet.candidates(), config, targets, prefixes, fleet.routing)
        self._prefixes = prefixes
        self._active: dict[RequestId, ActiveRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self.demand = DemandCounter(targets, self._active)
        self._intake = AdmissionController(
            self._waiting, config, quotas, prefixes, self._begin, self._fail, self.demand
        )
        self.check_feasible = self._intake.check_feasible  # of the Dispatch port
        self._feedback = RoutingFeedback(fleet, self._waiting, prefixes, self.demand)
        self.flows = self._feedback.flows
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        self._ticker = asyncio.create_task(self._tick_forever(), name="dispatch-tick")

    async def drain(self, timeout_s: float) -> int:
        """Take no new request and wait for those that run; returns how many were cut off."""
        self._intake.is_closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        left = list(self._active.values())
        for active in left:
            error = TandemError(ErrorKind.DRAINING, "this gateway is shutting down", retry_after_s=1.0)
            self._carry_out(active, active.life.failed(error))
        return len(left)

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def line(self) -> RequestQueue:
        """Who waits and what each was charged."""
        return self._waiting.line

    # ---- the Dispatch port

    def models(self) -> Sequence[ServedModel]:
        return self._fleet.models()

    def ready(self) -> str | None:
        return "draining" if self._intake.is_closed else self._fleet.ready()

    def num_queued(self) -> Mapping[Lane, int]:
        found = dict.fromkeys(Lane, 0)
        for active in list(self._active.values()):
            found[active.life.request.lane] += active.life.phase is JobGroupPhase.QUEUED
        return found

    def num_open(self) -> Mapping[tuple[TenantId, bool], int]:
        """Requests of clients that have not ended, by tenant and whether they wait for a place."""
        lives = [active.life for active in self._active.values() if active.fixed_placement is None]
        return Counter((life.request.tenant, life.phase is JobGroupPhase.QUEUED) for life in lives)

    def breakers(self) -> Mapping[WorkerId, BreakerState]:
        return self._waiting.breaker.states(self._clock.now())

    def scrape_targets(self) -> Sequence[ScrapeTarget]:
        return self._fleet.scrape_targets()

    async def open(self, request: Request, caller: RequestContext, ledger: PhaseLedger) -> ActiveRequest:
        """Admit a request; it waits in line when no worker has room."""
        active = await self._intake.admit(request, caller, ledger)
        self.place_queued()
        return active

    # ---- what the fleet reports

    def reported(self, worker: WorkerRef, events: Sequence[JobEvent]) -> None:
        now = self._clock.now()
        for event in events:
            active = self._active.get(event.key.request)
            if active is None:
                continue
            active.moved_at = now
            if type(event) is not Token:
                self._feedback.heard(active, worker, event)
            # A job's first token says more than what was drawn.
            elif event.num_cached_tokens is not None or event.stages is not None:
                self._feedback.on_first_token(active, worker, event, now)
            elif active.life.streamed(worker, event.key, event.index, (event.token.id,)):
                self._deliver(active, event)
                if active.ledger.phase is not LedgerPhase.DECODE:
                    active.keep_time(now)
                continue
            self._apply(active, partial(active.life.reported, worker, event))

    def lost(self, worker: WorkerRef, reason: str) -> None:
        self._waiting.forget(worker)
        for active in list(self._active.values()):
            self._apply(active, partial(active.life.worker_lost, worker, reason))

    def positions(self, worker: WorkerRef) -> list[tuple[JobKey, int]]:
        """What this gateway waits for from a worker: jobs and the index of each one's next token."""
        return [position for active in self._active.values() for position in active.life.positions(worker)]

    async def probe(self, placement: Placement, model: str) -> bool:
        """Send one tiny request through a pair of workers; True when its KV block has moved."""
        active = self._begin(probe_request(model), PhaseLedger(self._clock.now()), max_retries=0)
        active.fixed_placement = placement
        self._carry_out(active, active.life.placed(placement))
        return await has_moved(active)

    def on_capacity(self, worker: WorkerView) -> None:
        """A worker may take more than before."""
        if self._waiting.may_go_on(worker):
            self.place_queued()

    def place_queued(self) -> None:
        """Place what waits, in its turn, until the first finds no place."""
        while (turn := self._waiting.next(self._clock.now())) is not None:
            active = self._active[turn.request]
            self._fleet.add_inflight(turn.placement.prefill, turn.request, self._waiting.line.charged(turn.request))
            active.predicted = self._prefixes.predict(active.life.request, turn.placement, turn.num_hit_blocks)
            self._carry_out(active, active.life.placed(turn.placement))

    # ---- inside

    def _begin(self, request: Request, ledger: PhaseLedger, max_retries: int) -> ActiveRequest:
        life, now = RequestState(request, HandoffId(secrets.token_hex(12)), max_retries), self._clock.now()
        self._idle.clear()
        active = self._active[request.id] = ActiveRequest(life, ledger, now, self._closed, self._closed)
        active.keep_time(now)
        return active

    def _fail(self, request: RequestId, error: TandemError) -> bool:
        active = self._active.get(request)
        if active is not None:
            self._carry_out(active, active.life.failed(error))
        return active is not None

    def _closed(self, active: ActiveRequest, choice: int | None = None) -> None:
        """The client has enough of one choice, or of all."""
        self._apply(active, active.life.cancelled if choice is None else partial(active.life.finished, choice))

    def _apply(self, active: ActiveRequest, decide: Callable[[], Sequence[Command]]) -> None:
        """What a decision wants done. One that cannot be made ends its request, and no other."""
        try:
            commands = decide()
        except Exception as error:
            self._fail_internal(active, error)
        else:
            self._carry_out(active, commands)

    def _carry_out(self, active: ActiveRequest, commands: Sequence[Command]) -> None:
        """All of them, also where one fails, which ends the request."""
        failure: Exception | None = None
        for command in commands:
            try:
                self._do(active, command)
            except Exception as error:
                failure = error
        active.keep_time(self._clock.now())
        if failure is not None:
            self._fail_internal(active, failure)

    def _fail_internal(self, active: ActiveRequest, failure: Exception) -> None:
        log.error("request %s aborted", active.life.request.id, exc_info=failure, extra=OF_ANOTHER)
        error = TandemError(ErrorKind.INTERNAL, f"the gateway failed at this request: {failure!r}")
        with contextlib.suppress(Exception):
            self._carry_out(active, active.life.failed(error))
        if active.life.request.id in self._active:
            self._end(active, error)

    def _do(self, active: ActiveRequest, command: Command) -> None:
        match command:
            case Requeue():
                self._requeue(active, command)
            case FindConsumer():
                self._seek(active, command)
            case ReportWorkerFailure(workers):
                self._waiting.breaker.failed(workers, self._clock.now())
                self._fleet.suspect(workers)
            case Submit(worker, job):
                self._fleet.coming(worker, job)
                self._spawn(self._submit(active, worker, job))
            case CancelJob(worker, keys):
                self._fleet.cancel(worker, keys)
            case ReleaseLease(worker, lease):
                self._fleet.release(worker, lease)
            case Deliver(token):
                self._deliver(active, token)
            case DeliverPromptLogprobs(event) | EndChoice(event):
                active.told_at = self._clock.now()
                active.push(event)
            case EndRequest(outcome):
                self._end(active, outcome)

    def _deliver(self, active: ActiveRequest, token: Token) -> None:
        active.told_at = active.moved_at
        self._waiting.line.charge_output(active.life.request.id, 1)
        active.push(token)

    def _requeue(self, active: ActiveRequest, place: Requeue) -> None:
        """To its place in the line, or to the next tick where it has none."""
        self._unplace(active)
        if active.fixed_placement is None:
            self._waiting.refused(place.excluded, self._clock.now())
            if place.has_failed:
                self._waiting.failed(active.life.request.id, place)
            self._waiting.line.put_back(active.life.request.id)

    def _seek(self, active: ActiveRequest, seek: FindConsumer) -> None:
        """A probe is of its own two workers, and no others."""
        is_routed, model = active.fixed_placement is None, active.life.request.model
        consumer = self._waiting.pick_consumer(model, seek, self._clock.now()) if is_routed else None
        self._carry_out(active, active.life.consumer_found(seek.choice, consumer))

    def _end(self, active: ActiveRequest, outcome: Finished | TandemError) -> None:
        request = active.life.request.id
        self._active.pop(request, None)
        self._unplace(active)
        self._waiting.leave(request, active.life.num_cached)
        if not self._active:
            self._idle.set()
        active.push(outcome)
        if active.quota is not None:
            active.quota.close()

    def _unplace(self, active: ActiveRequest) -> None:
        """It does not go where it was to."""
        if active.life.placement is not None:
            self._fleet.add_inflight(active.life.placement.prefill, active.life.request.id, 0)

    async def _submit(self, active: ActiveRequest, worker: WorkerRef, job: Job) -> None:
        try:
            await self._fleet.submit(worker, job)
        except TandemError as error:
            if active.fixed_placement is not None and error.kind is ErrorKind.WORKER_LOST:
                self._carry_out(active, active.life.failed(error))  # it has nobody else to go to
            self._apply(active, partial(active.life.refused, worker, job.key, error))
        except Exception as error:
            self._fail_internal(active, error)
        else:
            active.moved_at = self._clock.now()
            self._apply(active, partial(active.life.accepted, worker, job.key))
            active.was_begun = active.was_begun or active.life.phase is JobGroupPhase.RUNNING
        if active.life.phase is JobGroupPhase.QUEUED:
            self.place_queued()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        # Often of another request than the one that runs; it must not be taken for that one's.
        task = asyncio.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick_forever(self) -> None:
        while True:
            async with log_and_continue("the tick of the dispatcher"):
                await asyncio.sleep(TICK_S)
                self._tick()

    def _tick(self) -> None:
        """Raises ExceptionGroup after all were seen to: what is wrong with one request holds up no other."""
        now, failures = self._clock.now(), []
        for active in list(self._active.values()):
            try:
                self._check_timeouts(active, now)
            except Exception as error:
                error.add_note(f"at request {active.life.request.id}")
                failures.append(error)
        self.place_queued()
        if failures:
            raise ExceptionGroup("requests that cannot be seen to", failures)

    def _check_timeouts(self, active: ActiveRequest, now: float) -> None:
        error = timeout_error(active, self._waiting, self._config, now)
        if error is not None:
            self._carry_out(active, active.life.failed(error))
        elif active.life.phase is JobGroupPhase.QUEUED:
            if active.fixed_placement is not None:
                self._carry_out(active, active.life.placed(active.fixed_placement))
        elif now - active.moved_at >= self._config.progress_timeout_s:
            active.moved_at = now
            reason = f"no progress within {self._config.progress_timeout_s:g} s"
            self._apply(active, partial(active.life.stalled, reason))
        for seek in active.life.seeks():
            self._seek(active, seek)
