"""One simulated gateway: runs real lives of requests with the real router; never decides anything about one.

It does what `gateway.dispatch` does on an event loop, with the same line and deadlines.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tandem.admission.usage_estimator import TokenUsage
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, Finished, JobEvent, KVReceived, SampledToken, Token
from tandem.core.ids import HandoffId, JobKey, RequestId, WorkerRef
from tandem.core.request import Job, Request
from tandem.core.worker_load import WorkerLoad
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
from tandem.flow.overdue import queue_timeout_error
from tandem.flow.request_queue import PlacementQueue
from tandem.flow.request_state import RequestState
from tandem.routing.router import Routing
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.lookahead import StepRun
from tandem.sim.cluster.network import Network
from tandem.sim.cluster.quotas import SimQuotas, Terms
from tandem.sim.cluster.token_delivery import Delivery
from tandem.sim.cluster.worker import SimWorker
from tandem.sim.cluster.worker_pool import SimWorkerPool
from tandem.sim.cluster.worker_rpc import Calls
from tandem.sim.cluster.worker_view import GatewayLink
from tandem.sim.kernel.event_queue import Actor, SimEventQueue
from tandem.workload.ask import MODEL, ScheduledRequest

TICK_S = 0.05
"""As the real dispatch's."""


Ended = Callable[[ClientTrace], None]


def ignore(_: object) -> None:
    """Looks at nothing."""


@dataclass(eq=False, slots=True)
class _Active:
    life: RequestState
    trace: ClientTrace
    ended: Ended
    received_at: float
    moved_at: float


class SimGateway:
    """A `Listener`. Every pair of workers counts as tried, as it is some seconds after a real start."""

    def __init__(
        self,
        agenda: SimEventQueue,
        network: Network,
        workers: Sequence[SimWorker],
        config: GatewayConfig,
        delivery: Delivery,
        party: Actor,
        terms: Terms,
    ) -> None:
        self.party = party
        self._agenda = agenda
        self._network = network
        self._delivery = delivery
        self._config = config
        self.delivered: Callable[[Token], None] = ignore
        self._calls = Calls(network, party)
        self._fleet = SimWorkerPool(agenda, network, config, party, self._place_queued)
        self._active: dict[RequestId, _Active] = {}
        self._quotas = SimQuotas(terms.tenants)
        routing = Routing(config.routing_policy, self._fleet.kv_links, config.remote_prefix)
        self._waiting = PlacementQueue(self._fleet.roster, config, terms.targets, network.index, routing)
        self._is_ticking = False
        for worker in workers:
            self.met(worker)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting.line)

    def check(self) -> None:
        """Nothing is open. Raises AssertionError naming what is."""
        self._waiting.line.check()
        self._quotas.check()
        assert not len(self._waiting.line), "a request that has ended waits for a place"
        assert not self._active, f"{len(self._active)} requests have no end: {list(self._active.values())[:3]}"
        for link in self._fleet.links():
            assert not link.decoding, f"{link.decoding} were to decode at {link.worker!r} and never taken"
            assert not link.placed, f"{link.placed} were placed at {link.worker!r} and never taken"

    def open(self, ask: ScheduledRequest, ended: Ended) -> None:
        """Admit a request now; it waits in line when no worker has room, and ends at once when it is refused.
        `ended` is called once, at its end."""
        now, trace = self._agenda.now, ClientTrace(ask)
        try:
            request = self._quotas.enter(ask.request, now)
        except TandemError as error:
            self._enter(ask.request, trace, ended)
            self._refuse(trace.id, error)
            return
        self._enter(request, trace, ended)
        tenant = self._quotas.tenant(request.tenant)
        try:
            admitted = self._waiting.admit(
                request, weight=tenant.weight, policy=tenant.disaggregation, hashes=self._fleet.names(request)
            )
        except TandemError as error:
            self._refuse(trace.id, error)
            return
        if admitted.leaves is not None and admitted.error is not None:
            self._refuse(admitted.leaves, admitted.error)
        self._place_queued()
        if not self._is_ticking:
            self._is_ticking = True
            self._agenda.after(TICK_S, "", self._tick, by=self.party)

    def close(self, request: RequestId) -> None:
        """The client is gone; nothing when its request has ended."""
        active = self._active.get(request)
        if active is not None:
            self._catch_up(active)
            self._carry_out(active, active.life.cancelled())

    def streamed(self, worker: WorkerRef, stretch: StepRun) -> None:
        link = self._fleet.find(worker)
        if link is not None:
            link.coming.append(stretch)

    def heard(self, worker: WorkerRef, events: Sequence[JobEvent], load: WorkerLoad | None) -> None:
        link = self._fleet.find(worker)
        if link is None or not link.is_live:
            return
        self._take_in(link)
        has_room = load is not None and load.may_take_more_than(link.load)
        if load is not None:
            link.load = load
            self._fleet.changed(link)
        for event in events:
            active = self._active.get(event.key.request)
            if isinstance(event, Finished):
                self._waiting.breaker.on_success(worker)
            if active is not None:
                if _may_end(event):
                    self._catch_up(active, but=worker)
                active.moved_at = self._agenda.now
                placement = active.life.placement
                if isinstance(event, KVReceived) and placement is not None and placement.decode == worker:
                    self._fleet.measured(placement, event)
                self._carry_out(active, active.life.reported(worker, event))
        if has_room and self._waiting.may_go_on(self._fleet.view(link)):
            self._place_queued()

    # ---- who comes and goes

    def met(self, worker: SimWorker) -> None:
        """A worker is there, another life of one, or one that could not be reached."""
        self._fleet.met(worker)
        self._place_queued()

    def missed(self, worker: WorkerRef) -> None:
        """As `SimWorkerPool.missed`."""
        self._fleet.missed(worker)

    def lost(self, worker: WorkerRef, reason: str) -> None:
        """A worker is gone with all that runs there; what it has said by now has come."""
        link = self._fleet.lost(worker)
        if link is None:
            return
        self._take_in(link)
        self._waiting.forget(worker)
        for active in list(self._active.values()):
            if worker in active.life.workers() or active.life.seeks():
                self._catch_up(active, but=worker)
                self._carry_out(active, active.life.worker_lost(worker, reason))
        self._place_queued()

    def waits_for(self, worker: WorkerRef) -> set[JobKey]:
        """The jobs there that it wants to hear of; it has no use for others of its own."""
        return {key for active in self._active.values() for key, _ in active.life.positions(worker)}

    # ---- what has come in the meantime

    def _catch_up(self, active: _Active, but: WorkerRef | None = None) -> None:
        """What a request's workers have said of steps that they took ahead, as far as it has come; all of `but`'s has
        been heard."""
        links = [self._fleet.find(worker) for worker in active.life.workers() if worker != but]
        for link in [link for link in links if link is not None]:
            link.worker.settle()
            self._take_in(link)

    def _take_in(self, link: GatewayLink) -> None:
        while link.coming and (num_come := self._fleet.num_come(link, link.coming[0])):
            stretch = link.coming.popleft()
            if num_come < len(stretch.ends):
                stretch, rest = stretch.split(num_come)
                link.coming.appendleft(rest)
            self._hear_stretch(link, stretch)

    def _hear_stretch(self, link: GatewayLink, stretch: StepRun) -> None:
        worker, delay_s = link.worker.ref, self._network.latency_s
        link.load = stretch.load
        if stretch.num_free[-1] != link.load.num_free_blocks:
            link.load = replace(link.load, num_free_blocks=stretch.num_free[-1])
        times = array("d", [end + delay_s for end in stretch.ends])
        for tokens in stretch.tokens:
            active = self._active.get(tokens.key.request)
            if active is None:
                continue
            active.moved_at = times[-1]
            self._waiting.line.charge_output(tokens.key.request, len(tokens.ids))
            if active.life.streamed(worker, tokens.key, tokens.first_index, tokens.ids):
                reached = self._delivery.times(tokens.key.request, tokens.first_index, times)
                active.trace.deliver_all(tokens.ids, reached)
                continue
            for i, token in enumerate(tokens.ids):
                event = Token(tokens.key, tokens.first_index + i, SampledToken(token))
                self._carry_out(active, active.life.reported(worker, event), times[i])

    # ---- inside

    def _enter(self, request: Request, trace: ClientTrace, ended: Ended) -> None:
        now = self._agenda.now
        life = RequestState(request, HandoffId(f"h-{request.id}"), self._config.max_retries)
        self._active[request.id] = _Active(life, trace, ended, now, now)

    def _refuse(self, request: RequestId, error: TandemError) -> None:
        active = self._active[request]
        self._carry_out(active, active.life.failed(error))

    def _place_queued(self) -> None:
        """Place what waits, in its turn, until the first finds no place."""
        while (turn := self._waiting.next(self._agenda.now)) is not None:
            active = self._active[turn.request]
            active.trace.path = turn.placement.path
            self._fleet.expect(turn.placement.prefill, turn.request, self._waiting.line.charged(turn.request))
            self._carry_out(active, active.life.placed(turn.placement))

    def _carry_out(self, active: _Active, commands: Sequence[Command], at: float | None = None) -> None:
        """`at`: when what caused them came, if not now."""
        now = self._agenda.now if at is None else at
        for command in commands:
            match command:
                case Deliver(token):
                    self.delivered(token)
                    delay = self._delivery.seconds(active.life.request.id, token.index)
                    active.trace.deliver(token.token.id, now + delay)
                    self._waiting.line.charge_output(active.life.request.id, 1)
                case EndRequest(outcome):
                    self._end(active, outcome)
                case DeliverPromptLogprobs() | EndChoice():
                    pass  # nobody reads scores, and a simulated request has one choice
                case Requeue() | FindConsumer():
                    self._find(active, command)
                case ReportWorkerFailure(workers):
                    self._waiting.breaker.failed(workers, self._agenda.now)
                    self._fleet.suspect(workers)
                case Submit(worker, job):
                    self._submit(active, worker, job)
                case CancelJob() | ReleaseLease():
                    self._calls.tell(command)

    def _find(self, active: _Active, command: Requeue | FindConsumer) -> None:
        request, now = active.life.request.id, self._agenda.now
        if isinstance(command, FindConsumer):
            consumer = self._waiting.pick_consumer(MODEL, command, now)
            self._carry_out(active, active.life.consumer_found(command.choice, consumer))
            return
        self._waiting.refused(command.excluded, now)
        if command.has_failed:
            self._waiting.failed(request, command)
        self._fleet.unexpect(active.life.placement, request)
        self._waiting.line.put_back(request)

    def _end(self, active: _Active, outcome: Finished | TandemError) -> None:
        now, trace = self._agenda.now, active.trace
        trace.path = active.life.path
        self._fleet.unexpect(active.life.placement, trace.id)
        del self._active[trace.id]
        self._waiting.leave(trace.id, active.life.num_cached)
        num_output = len(trace.token_times)
        spent = TokenUsage(trace.num_prompt - (active.life.num_cached or 0), num_output) if num_output else None
        self._quotas.settle(trace.id, active.life.request.tenant, spent, now)
        trace.end(outcome, now)
        kind = "finished" if isinstance(outcome, Finished) else outcome.kind.value
        self.party.log.note(now, f"end {trace.id} {kind} {trace.path}")
        self.party.log.note_bytes(trace.token_times.tobytes())
        active.ended(trace)

    def _submit(self, active: _Active, ref: WorkerRef, job: Job) -> None:
        """A call whose answer brings the worker's load along."""
        link = self._fleet.find(ref)
        if link is None or not link.is_live:
            gone = TandemError(ErrorKind.WORKER_LOST, f"worker {ref.id} is gone")
            self._carry_out(active, active.life.refused(ref, job.key, gone))
            return

        def answered(refusal: TandemError | None, load: WorkerLoad) -> None:
            if not link.is_live or self._fleet.find(ref) is not link:
                return
            link.answered(job)
            self._take_in(link)
            link.load = load
            self._fleet.changed(link)
            if refusal is not None:
                self._carry_out(active, active.life.refused(ref, job.key, refusal))
                self._place_queued()
            else:
                active.moved_at = self._agenda.now
                self._carry_out(active, active.life.accepted(ref, job.key))

        self._fleet.coming(link, job)
        self._calls.submit(link.worker, job, answered)

    def _tick(self) -> None:
        self._network.index.collect(link.worker for link in self._fleet.links())
        for active in list(self._active.values()):
            self._see_to(active)
        self._place_queued()
        self._is_ticking = bool(self._active)
        if self._is_ticking:
            self._agenda.after(TICK_S, "", self._tick, by=self.party)

    def _see_to(self, active: _Active) -> None:
        now, life = self._agenda.now, active.life
        if life.phase is JobGroupPhase.QUEUED:
            told_at = max(active.received_at, active.trace.told_at)
            why = partial(self._waiting.why, MODEL, now)
            error = queue_timeout_error(self._config, told_at, self._waiting.hopeless_since(MODEL), now, why)
            if error is not None:
                self._catch_up(active)
                self._carry_out(active, life.failed(error))
            return
        if now - active.moved_at >= self._config.progress_timeout_s:
            self._catch_up(active)
        if now - active.moved_at >= self._config.progress_timeout_s:
            active.moved_at = now
            self._carry_out(active, life.stalled(f"no progress within {self._config.progress_timeout_s:g} s"))
        for seek in life.seeks():
            self._find(active, seek)


def _may_end(event: JobEvent) -> bool:
    """Whether it may end a request for which another worker has steps ahead."""
    return isinstance(event, Failed | Cancelled) or (isinstance(event, Finished) and event.reason is not None)
