"""Drive a `RequestDirector` with asyncio: admit requests, carry out its commands, and pass to it what workers
report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextvars import Context

from tandem.admission.tenant import apply_tenant_policy
from tandem.admission.tenant_quota_state import QuotaReservation
from tandem.core.clock import Clock
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, PromptLogprobs, Token
from tandem.core.ids import HandoffId, RequestId, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import Job, Request
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.context.supervise import BackgroundLoop
from tandem.gateway.orchestration.active_request import ActiveRequest
from tandem.gateway.orchestration.demand import DemandCounter
from tandem.gateway.prefix.prefix_index_client import PrefixIndexClient
from tandem.gateway.telemetry.kv_flows import Flows
from tandem.gateway.tenants.quotas import TenantQuotas
from tandem.gateway.workers.pool_events import (
    PlacementsChanged,
    PoolEvent,
    PositionsRequested,
    ProbeDue,
    WorkerLost,
    WorkerReported,
)
from tandem.gateway.workers.worker_pool import WorkerPool
from tandem.obs.logs.log_formatters import OF_ANOTHER
from tandem.orchestration.commands import (
    CancelJob,
    Command,
    EndRequest,
    KVMoved,
    MoveOutcome,
    OfferMigration,
    PromptComputed,
    ReleaseLease,
    ReportMove,
    ReportWorkerFailure,
    SubmitJob,
)
from tandem.orchestration.director import TICK_S, AdmittedRequest, RequestDirector, probe_request
from tandem.orchestration.phase_ledger import PhaseLedger
from tandem.routing.circuit_breaker import BreakerState
from tandem.routing.placement import Placement
from tandem.routing.rebalance import Relocation
from tandem.routing.shortages import Shortage
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets

log = logging.getLogger(__name__)
_DRAINING = "this gateway is shutting down; send the request to another gateway"
FLUSH_S = 1.0
"""Most seconds that a stop waits for workers to answer submitted jobs."""


class RequestDriver:
    """Run the requests of a gateway, as its `RequestDispatcher`; all calls must be on one event loop.

    `director` decides what happens to each request, and the driver carries out the decisions: it pushes tokens to the
    streams of open requests and submits jobs through the worker pool `fleet`. It passes the pool's events to the
    director. `quotas`: None where nothing is limited. `targets`: latency targets by lane. `prefixes`: finds the workers
    that cache the beginning of a prompt; None: cached prefixes are not looked up."""

    def __init__(
        self,
        fleet: WorkerPool,
        config: GatewayConfig,
        clock: Clock,
        quotas: TenantQuotas | None,
        targets: LatencyTargets = NO_TARGETS,
        prefixes: PrefixIndexClient | None = None,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._quotas = quotas
        self._prefixes = prefixes
        self._disaggregation = config.disaggregation
        self.director = RequestDirector(fleet, config, _new_handoff, targets, prefixes)
        # Calls that a part of this driver answers alone.
        self.num_live = fleet.num_live
        self.kv_blocks = fleet.kv_blocks
        self.models = fleet.models
        self.scrape_targets = fleet.scrape_targets
        self.problem = fleet.problem
        self.num_wakeable = fleet.num_wakeable
        self.num_held = self.director.num_held
        self.num_queued = self.director.num_queued
        self.num_open = self.director.num_open
        self.demand = DemandCounter(targets, self.director.backlog)
        self.flows = Flows()
        self._num_moves: Counter[MoveOutcome] = Counter()
        self._streams: dict[RequestId, ActiveRequest] = {}
        self._submits: set[asyncio.Task[None]] = set()
        self._probes: set[asyncio.Task[None]] = set()
        self._loops = (
            BackgroundLoop("the tick of the request driver", self._tick),
            BackgroundLoop("the reader of worker events", self._read_pool_events),
        )
        self._held_models: frozenset[str] = frozenset()
        self._is_closed = False
        self._client_requests: set[RequestId] = set()  # open ones, without link tests
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        for loop in self._loops:
            await loop.start()

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait until the open ones have ended, at most `timeout_s` seconds.

        Returns how many requests had not ended by then; these fail with DRAINING. Link tests are not waited for.
        """
        self._is_closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        left = list(self._client_requests)
        for request in left:
            error = TandemError(ErrorKind.DRAINING, _DRAINING, retry_after_s=1.0)
            self._execute(self.director.fail(request, error, self._clock.now()))
        return len(left)

    async def stop(self) -> None:
        """Stop the loops, cancel the link tests, and give workers up to FLUSH_S seconds to answer submitted jobs. The
        worker pool must still run, because the jobs of a cancelled link test are cancelled at their workers."""
        for loop in self._loops:
            await loop.stop()
        for task in self._probes:
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        if self._submits:
            _, unanswered = await asyncio.wait(self._submits, timeout=FLUSH_S)
            for task in unanswered:
                task.cancel()

    # ---- the Dispatch port

    def ready(self) -> str | None:
        return "draining" if self._is_closed else self._fleet.ready()

    def shortages(self) -> Sequence[Shortage]:
        """Return what each model lacks, such as a live prefill worker.

        Where the planner may have ended the missing workers on purpose, a model is left out unless it has an open
        request."""
        in_use = {one.state.request.model for one in self.director.requests() if one.fixed_placement is None}
        found = self._fleet.shortages()
        return [shortage for shortage in found if shortage.model in in_use or not self._fleet.is_intended(shortage)]

    def fairness(self) -> Mapping[tuple[str, Lane], float]:
        """Return how evenly the tenants that waited were served during the last minute, by (model, lane).

        The value is Jain's index of the service that each of these tenants got, divided by the tenant's weight: 1 where
        it is equal for all of them, or where fewer than two tenants waited."""
        return self.director.queue.fairness(self._clock.now())

    def breakers(self) -> Mapping[WorkerId, BreakerState]:
        """Return the state of each circuit breaker, which stops requests to a failing worker; only workers whose last
        jobs failed have an entry."""
        return self.director.breakers(self._clock.now())

    def num_moves(self) -> Mapping[str, int]:
        """Return the number of planned moves of running or preempted sequences to other decode workers, by their
        outcome (the value of a `MoveOutcome`)."""
        return {outcome.value: self._num_moves[outcome] for outcome in MoveOutcome}

    def check_feasible(self, requests: Sequence[Request], caller: RequestContext) -> None:
        """Raise TandemError(INVALID_REQUEST) where the limits of the caller's tenant could never admit all `requests`
        together."""
        if self._quotas is not None:
            sizes = [(len(request.prompt_tokens), request.max_output_tokens) for request in requests]
            self._quotas.check_feasible(caller.tenant, sizes)

    async def open(self, request: Request, caller: RequestContext, ledger: PhaseLedger) -> ActiveRequest:
        """Admit a request and return its stream, before it has a placement.

        `ledger` accounts for the time of the request. Raises TandemError where the request is refused; then no quota,
        queue or worker holds anything of it."""
        tenant = caller.tenant.choosing(caller.disaggregation, self._disaggregation)
        request = apply_tenant_policy(request, tenant)
        self._refuse_when_closed()
        quota: QuotaReservation | None = None
        if self._quotas is not None:
            quota = await self._quotas.enter(tenant, len(request.prompt_tokens), request.max_output_tokens)
        try:
            hashes = () if self._prefixes is None else await self._prefixes.name(request)
            self._refuse_when_closed()  # it may have been closed meanwhile
            self.demand.on_admitted(request)  # from here on only a lack of room keeps it out
            admitted = self.director.submit(
                request,
                self._clock.now(),
                tenant,
                timeout_s=caller.timeout_s,
                hashes=hashes,
                session=caller.tenant_session,
                ledger=ledger,
            )
        except BaseException:
            if quota is not None:
                quota.close()
            raise
        active = self._open_stream(admitted)
        active.quota = quota
        self._client_requests.add(request.id)
        self._idle.clear()
        if quota is not None:
            quota.watch(admitted.open_request.usage)
        self._execute(admitted.commands)
        return active

    # ---- what the worker pool reports

    async def _read_pool_events(self) -> float:
        async for event in self._fleet.events():
            try:
                self.on_pool_event(event)
            except Exception:  # of one worker; those of all others are read on
                log.exception("the gateway failed to process an event of its workers: %s", type(event).__name__)
        return 0.0

    def on_pool_event(self, event: PoolEvent) -> None:
        """Apply one event of the worker pool to the requests that it concerns."""
        now = self._clock.now()
        match event:
            case WorkerReported(worker, events, freed):
                try:
                    self._execute(self.director.on_worker_events(worker, events, now))
                except Exception:
                    self._fleet.reopen_after_error(worker)
                if freed is not None:
                    self._execute(self.director.on_capacity(freed, now))
            case WorkerLost(worker, reason):
                self._execute(self.director.on_worker_lost(worker, reason, now))
            case PositionsRequested(worker, reply):
                if reply.done():
                    return
                try:
                    reply.set_result(self.director.positions(worker))
                except Exception as error:
                    reply.set_exception(error)  # the link tries again
            case ProbeDue(pair, model):
                self._spawn(self._fleet.record_probe(pair, self._probe(Placement(*pair), model)), self._probes)
            case PlacementsChanged():
                self._execute(self.director.place_queued(now))

    async def _probe(self, placement: Placement, model: str) -> str | None:
        """Send one tiny request through a pair of workers; return None where its KV block has moved, else why not."""
        request = probe_request(RequestId(f"probe-{secrets.token_hex(8)}"), model)
        admitted = self.director.probe(request, placement, self._clock.now())
        active = self._open_stream(admitted)
        self._execute(admitted.commands)
        try:
            async for _ in active:
                pass
        except TandemError as error:
            return error.message
        finally:
            active.close()
        return "the test request was served without moving a block" if active.state.pulled is None else None

    # ---- inside

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise TandemError(ErrorKind.DRAINING, _DRAINING, retry_after_s=1.0)

    def _open_stream(self, admitted: AdmittedRequest) -> ActiveRequest:
        """Open the stream of a request before its commands are carried out."""
        active = ActiveRequest(admitted.open_request, self._cancel, self._finish)
        self._streams[admitted.open_request.id] = active
        return active

    def _cancel(self, request: RequestId) -> None:
        self._execute(self.director.cancel(request, self._clock.now()))

    def _finish(self, request: RequestId, choice: int) -> None:
        self._execute(self.director.finish(request, choice, self._clock.now()))

    def _execute(self, commands: Sequence[Command]) -> None:
        """Carry out commands in order. One that fails ends its own request, and no other."""
        for command in commands:
            if type(command) is Token:  # by far the most
                stream = self._streams.get(command.key.request)
                if stream is not None:
                    stream.push(command)
                continue
            try:
                self._do(command)
            except Exception as failure:
                request = _request_of(command)
                if request is None:
                    log.exception("the gateway failed to carry out %r", command)
                else:
                    self._execute(self.director.abort(request, failure, self._clock.now()))

    def _do(self, command: Command) -> None:
        match command:
            case Token() | PromptLogprobs() | Finished():
                stream = self._streams.get(command.key.request)
                if stream is not None:
                    stream.push(command)
            case SubmitJob(worker, job):
                self._spawn(self._submit(worker, job), self._submits)
            case CancelJob() | OfferMigration() | ReleaseLease():
                self._fleet.send_order(command)
            case ReportMove(move, outcome):
                self._report_move(move, outcome)
            case ReportWorkerFailure(workers):
                self._fleet.suspect(workers)
            case PromptComputed(request, num_cached):
                self.demand.on_first_token(request, num_cached)
            case KVMoved(source, consumer, num_bytes, is_prefix):
                self.flows.moved(source.id, consumer.id, "prefix" if is_prefix else "handoff", num_bytes)
            case EndRequest():
                self._end(command)

    def _report_move(self, move: Relocation, outcome: MoveOutcome) -> None:
        self._num_moves[outcome] += 1
        log.info(
            "move of request %s from worker %s to %s: %s (%s)",
            move.key.request,
            move.source.id,
            move.target.id,
            outcome.value,
            move.why,
            extra=OF_ANOTHER,
        )

    def _end(self, end: EndRequest) -> None:
        stream = self._streams.pop(end.request, None)
        outcome = end.outcome
        if isinstance(outcome, TandemError) and outcome.kind is ErrorKind.INTERNAL and outcome.__cause__ is not None:
            message = "the gateway aborted request %s because of a defect"
            log.error(message, end.request, exc_info=outcome.__cause__, extra=OF_ANOTHER)
        if stream is not None:
            stream.push(outcome)
            if stream.quota is not None:
                stream.quota.close()
        self._client_requests.discard(end.request)
        if not self._client_requests:
            self._idle.set()

    async def _submit(self, worker: WorkerRef, job: Job) -> None:
        error: TandemError | None = None
        try:
            await self._fleet.submit(worker, job)
        except TandemError as refusal:
            error = refusal
        except Exception as failure:
            self._execute(self.director.abort(job.request.id, failure, self._clock.now()))
            return
        self._execute(self.director.on_submit_result(worker, job.key, error, self._clock.now()))

    def _spawn(self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> None:
        """Start a task and keep it in `tasks` until its end. Its context is empty, because the work is often for
        another request than the one whose context runs now."""
        task = asyncio.create_task(work, context=Context())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _tick(self) -> float:
        self._execute(self.director.on_timer(self._clock.now()))
        self._log_held()
        self._execute(self.director.rebalance(self._clock.now()))
        return TICK_S

    def _log_held(self) -> None:
        """Log once when requests of a model begin to wait for a first worker, and once when none does any more."""
        held = frozenset(self.num_held())
        for model in sorted(held - self._held_models):
            log.info("requests for model %s are held until a worker can serve them", model)
        for model in sorted(self._held_models - held):
            log.info("no request for model %s is held any more", model)
        self._held_models = held


def _new_handoff(request: RequestId) -> HandoffId:
    return HandoffId(secrets.token_hex(12))


def _request_of(command: Command) -> RequestId | None:
    match command:
        case SubmitJob(job=job):
            return job.request.id
        case CancelJob(keys=keys) | OfferMigration(keys=keys):
            return keys[0].request if keys else None
        case EndRequest(request=request):
            return request
        case PromptComputed(request=request):
            return request.id
        case Token() | PromptLogprobs() | Finished():
            return command.key.request
        case ReportWorkerFailure() | ReleaseLease() | KVMoved() | ReportMove():
            return None
