"""Drive a `RequestDirector` under the virtual clock: one simulated gateway."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, Finished, JobEvent, PromptLogprobs, Token
from tandem.core.ids import HandoffId, JobKey, RequestId, WorkerRef
from tandem.core.request import Job
from tandem.core.worker_load import WorkerLoad
from tandem.orchestration.commands import (
    CancelJob,
    Command,
    EndRequest,
    KVMoved,
    PromptComputed,
    ReleaseLease,
    ReportWorkerFailure,
    SubmitJob,
)
from tandem.orchestration.director import TICK_S, RequestDirector
from tandem.orchestration.request_queue import RequestTerms
from tandem.sim.cluster.client_streams import ClientStreams, Ended
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.lookahead import StepRun
from tandem.sim.cluster.network import Network
from tandem.sim.cluster.quotas import SimQuotas, Terms
from tandem.sim.cluster.step_intake import StepIntake
from tandem.sim.cluster.token_delivery import Delivery
from tandem.sim.cluster.worker import SimWorker
from tandem.sim.cluster.worker_pool import SimWorkerPool
from tandem.sim.cluster.worker_rpc import Calls
from tandem.sim.kernel.event_queue import Actor, SimEventQueue
from tandem.workload.scheduled_request import ScheduledRequest


class SimGateway:
    """One simulated gateway: a director, the workers that it knows, and the streams of its open requests.

    Every pair of workers counts as tried, as it is some seconds after a real start.
    """

    def __init__(
        self, agenda: SimEventQueue, network: Network, workers: Sequence[SimWorker], config: GatewayConfig,
        delivery: Delivery, party: Actor, terms: Terms,
    ) -> None:  # fmt: skip
        self.party = party
        self._agenda = agenda
        self._network = network
        self._calls = Calls(network, party)
        self._workers = SimWorkerPool(agenda, network, config, party, self._place_queued)
        self._quotas = SimQuotas(terms.tenants)
        self._director = RequestDirector(self._workers, config, _handoff, terms.targets, network.index)
        self.streams = ClientStreams(agenda, party, delivery, self._quotas)
        self._intake = StepIntake(self._director, self._workers, self.streams, network.latency_s, self._execute)
        self._is_ticking = False
        for worker in workers:
            self.met(worker)

    @property
    def num_queued(self) -> int:
        return len(self._director.queue)

    def check(self) -> None:
        """Raise AssertionError naming what is still open."""
        self._director.check()
        self._quotas.check()
        self.streams.check()
        assert not self._director.requests(), "a request without a stream is open"
        self._workers.check()

    def open(self, scheduled: ScheduledRequest, ended: Ended) -> None:
        """Admit a request now. `ended` is called once, at its end, which is now where it is refused."""
        now, trace = self._agenda.now, ClientTrace(scheduled)
        try:
            request = self._quotas.enter(scheduled.request, now)
            tenant = self._quotas.tenant(request.tenant)
            hashes = self._workers.names(request)
            terms = RequestTerms(weight=tenant.weight, policy=tenant.disaggregation, hashes=hashes)
            admitted = self._director.submit(request, now, terms)
        except TandemError as error:
            self.streams.refuse(scheduled.request, trace, ended, error)
            return
        self.streams.open(admitted.open_request, trace, ended)
        self._execute(admitted.commands)
        if not self._is_ticking:
            self._is_ticking = True
            self._agenda.after(TICK_S, "", self._tick, by=self.party)

    def close(self, request: RequestId) -> None:
        """End a request whose client is gone; nothing when it has ended."""
        self._intake.catch_up([request])
        self._execute(self._director.cancel(request, self._agenda.now))

    # ---- what workers report

    def streamed(self, worker: WorkerRef, steps: StepRun) -> None:
        link = self._workers.find(worker)
        if link is not None:
            link.coming.append(steps)

    def on_worker_events(self, worker: WorkerRef, events: Sequence[JobEvent], load: WorkerLoad | None) -> None:
        link = self._workers.find(worker)
        if link is None or not link.is_live:
            return
        self._intake.take_in(link)
        has_room = load is not None and load.may_take_more_than(link.load)
        if load is not None:
            link.load = load
            self._workers.changed(link)
        self._intake.catch_up([event.key.request for event in events if _may_end(event)], but=worker)
        self._execute(self._director.on_worker_events(worker, events, self._agenda.now))
        if has_room:
            self._execute(self._director.on_capacity(self._workers.view(link), self._agenda.now))

    def met(self, worker: SimWorker) -> None:
        """Add a discovered worker: a new one, a new incarnation, or one that was out of reach."""
        self._workers.met(worker)
        self._place_queued()

    def missed(self, worker: WorkerRef) -> None:
        """Stop the use of a worker whose stream ended."""
        self._workers.missed(worker)

    def lost(self, worker: WorkerRef, reason: str) -> None:
        """Handle the loss of a worker with all its jobs, after its reports that have arrived by now."""
        link = self._workers.lost(worker)
        if link is None:
            return
        self._intake.take_in(link)
        states = [one.state for one in self._director.requests()]
        self._intake.catch_up([s.request.id for s in states if worker in s.workers() or s.seeks()], but=worker)
        self._execute(self._director.on_worker_lost(worker, reason, self._agenda.now))
        self._place_queued()

    def waits_for(self, worker: WorkerRef) -> set[JobKey]:
        """Return the jobs at a worker that are open here; the worker may drop all others of this gateway."""
        return {key for key, _ in self._director.positions(worker)}

    # ---- inside

    def _place_queued(self) -> None:
        self._execute(self._director.place_queued(self._agenda.now))

    def _execute(self, commands: Sequence[Command], at: float | None = None) -> None:
        """Carry out commands. `at`: when what caused them came, if not now."""
        now, pending = self._agenda.now if at is None else at, deque(commands)
        while pending:
            match pending.popleft():
                case Token() as token:
                    self.streams.deliver(token, now)
                case SubmitJob(worker, job):
                    pending.extend(self._submit(worker, job))
                case CancelJob() | ReleaseLease() as command:
                    self._calls.send_command(command)
                case ReportWorkerFailure(workers):
                    self._workers.suspect(workers)
                case EndRequest() as end:
                    self.streams.end(end)
                case PromptLogprobs() | Finished() | PromptComputed() | KVMoved():
                    pass  # a simulated request has one choice and no scores, and demand is counted at its end

    def _submit(self, ref: WorkerRef, job: Job) -> Sequence[Command]:
        """Submit a job to a worker; the answer contains the worker's load."""
        link = self._workers.find(ref)
        if link is None or not link.is_live:
            if link is not None:
                link.answered(job)
            gone = TandemError(ErrorKind.WORKER_LOST, f"worker {ref.id} is gone")
            return self._director.on_submit_result(ref, job.key, gone, self._agenda.now)

        def answered(refusal: TandemError | None, load: WorkerLoad) -> None:
            if not link.is_live or self._workers.find(ref) is not link:
                return
            link.answered(job)
            self._intake.take_in(link)
            link.load = load
            self._workers.changed(link)
            self._execute(self._director.on_submit_result(ref, job.key, refusal, self._agenda.now))

        self._calls.submit(link.worker, job, answered)
        return ()

    def _tick(self) -> None:
        self._network.index.collect(link.worker for link in self._workers.links())
        self._intake.catch_up(self._director.overdue(self._agenda.now))
        self._execute(self._director.on_timer(self._agenda.now))
        self._is_ticking = bool(len(self.streams))
        if self._is_ticking:
            self._agenda.after(TICK_S, "", self._tick, by=self.party)


def _handoff(request: RequestId) -> HandoffId:
    return HandoffId(f"h-{request}")


def _may_end(event: JobEvent) -> bool:
    """Return whether an event may end a request for which another worker has taken steps ahead."""
    return isinstance(event, Failed | Cancelled) or (isinstance(event, Finished) and event.reason is not None)
