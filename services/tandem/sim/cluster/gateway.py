"""Drive a `RequestDirector` under the virtual clock: one simulated gateway."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tandem.admission.tenant_quota_state import QuotaReservation
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, Finished, JobEvent, Preempted, PromptLogprobs, SampledToken, Token
from tandem.core.ids import HandoffId, RequestId, WorkerRef
from tandem.core.request import Job, Request
from tandem.core.worker_load import WorkerLoad
from tandem.orchestration import commands
from tandem.orchestration.director import TICK_S, AdmittedRequest, RequestDirector
from tandem.routing.placement import Placement
from tandem.routing.worker_view import Pair
from tandem.sim.cluster.client_trace import ClientStreams, ClientTrace, Delivery, Ended, ignore
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.network import Network
from tandem.sim.cluster.quotas import SimQuotas
from tandem.sim.cluster.worker import SimWorker, StepRun
from tandem.sim.cluster.worker_pool import GatewayLink, SimWorkerPool
from tandem.sim.kernel.event_queue import Actor, SimEventQueue
from tandem.workload.scheduled_request import ScheduledRequest


class SimGateway:
    """Represent one simulated gateway: a director, the workers that it knows, and the streams of its open requests.
    Implements `Listener` for the workers' reports.

    `workers`: the workers at the start of the run. KV may move between every pair of them from the start, without a
    probe, as in a real cluster some seconds after its start.

    Workers report series of decode steps ahead of the clock. The reports of each worker are applied in order, as far as
    they have reached the gateway by now. Before an event that may end a request, the reports of all workers of that
    request are applied (`catch_up`)."""

    def __init__(
        self, agenda: SimEventQueue, network: Network, workers: Iterable[SimWorker], spec: ClusterSpec, party: Actor
    ) -> None:
        self.party = party
        self._agenda = agenda
        self._network = network
        self.workers = SimWorkerPool(agenda, network.latency_s, spec.gateway, party, self._probe)
        self._quotas = SimQuotas(agenda, spec.tenants)
        self.director = RequestDirector(self.workers, spec.gateway, HandoffId, spec.targets, network.index)
        self.streams = ClientStreams(agenda, party, Delivery(spec.delivery_s, spec.seed))
        self.on_preempted: Callable[[RequestId], None] = ignore
        """Called with each of its requests of which a worker has reported a preemption."""
        self._is_ticking = False
        self.workers.begin(workers)

    def check(self) -> None:
        """Raise AssertionError naming a request, reservation or probe that is still open."""
        for part in (self.director, self._quotas, self.streams, self.workers):
            part.check()
        assert not self.director.requests(), "a request without a stream is open"

    def open(self, scheduled: ScheduledRequest, ended: Ended) -> None:
        """Admit a request now.

        `ended`: called once with the trace of the request, when the request ends; this is at once if it is refused.
        """
        trace = ClientTrace(scheduled)
        quota: QuotaReservation | None = None
        try:
            tenant, request, quota = self._quotas.enter(scheduled.request)
            admitted = self.director.submit(
                request, self._agenda.now, tenant, timeout_s=scheduled.timeout_s,
                hashes=self.workers.names(request), session=scheduled.session,
            )  # fmt: skip
        except TandemError as error:
            self.streams.close(trace, ended, error, quota)
        else:
            self._begin(admitted, trace, ended, quota)

    def close(self, request: RequestId) -> None:
        """End a request whose client has disconnected; do nothing when the request has ended."""
        self.catch_up([request])
        self._execute(self.director.cancel(request, self._agenda.now))

    def _execute(self, pending: Iterable[commands.Command], at: float | None = None) -> None:
        """Carry out commands of the director. `at`: virtual time of the event that caused them; None: now."""
        now, queue = self._agenda.now if at is None else at, deque(pending)
        while queue:
            match queue.popleft():
                case Token() as token:
                    self.streams.deliver(token, now)
                case commands.SubmitJob(worker, job):
                    queue.extend(self._submit(worker, job))
                case commands.CancelJob() | commands.OfferMigration() | commands.ReleaseLease() as order:
                    self._network.send_order(order, self.party)
                case commands.ReportWorkerFailure(workers):
                    self.workers.suspect(workers)
                case commands.EndRequest() as end:
                    self.streams.end(end)
                case commands.PromptComputed(request, num_cached):
                    self.streams.computed(request, num_cached)
                case PromptLogprobs() | Finished() | commands.KVMoved() | commands.ReportMove():
                    pass  # no simulated client takes scores or the ends of single choices

    def _begin(
        self, admitted: AdmittedRequest, trace: ClientTrace, ended: Ended, quota: QuotaReservation | None = None
    ) -> None:
        self.streams.open(admitted.open_request, trace, ended, quota)
        self._execute(admitted.commands)
        if not self._is_ticking:
            self._is_ticking = True
            self._agenda.after(TICK_S, "", self._tick, by=self.party)

    def _probe(self, pair: Pair, request: Request) -> None:
        admitted = self.director.probe(request, Placement(*pair), self._agenda.now)

        def ended(_: ClientTrace) -> None:
            self.workers.probed(pair, moved=admitted.open_request.state.pulled is not None)
            self._execute(self.director.place_queued(self._agenda.now))

        self._begin(admitted, ClientTrace(ScheduledRequest(request, "", self._agenda.now)), ended)

    def _tick(self) -> None:
        self._network.index.collect(link.worker for link in self.workers.links())
        self.catch_up(self.director.overdue(self._agenda.now))
        self._execute(self.director.on_timer(self._agenda.now))
        self._execute(self.director.rebalance(self._agenda.now))
        self._is_ticking = bool(len(self.streams))
        if self._is_ticking:
            self._agenda.after(TICK_S, "", self._tick, by=self.party)

    # ---- what workers report

    def streamed(self, worker: WorkerRef, steps: StepRun) -> None:
        link = self.workers.find(worker)
        if link is not None:
            link.coming.append(steps)

    def on_worker_events(self, worker: WorkerRef, events: Sequence[JobEvent], load: WorkerLoad | None) -> None:
        link, now = self.workers.find(worker), self._agenda.now
        if link is None or not link.is_live:
            return
        self._take_in(link)
        has_room = load is not None and load.may_take_more_than(link.load)
        if load is not None:
            link.load = load
            self.workers.changed(link)
        self.catch_up([event.key.request for event in events if _may_end(event)], but=worker)
        self._execute(self.director.on_worker_events(worker, events, now), now)
        for event in events:
            if isinstance(event, Preempted) and self.streams.workers(event.key.request):
                self.on_preempted(event.key.request)
        if has_room:
            self._execute(self.director.on_capacity(self.workers.view(link), now), now)

    def _submit(self, ref: WorkerRef, job: Job) -> Sequence[commands.Command]:
        """Send a job to a worker, whose answer arrives later as an event.

        Returns no commands, or the director's commands when the worker is already lost.
        """
        link = self.workers.find(ref)
        if link is None or not link.is_live:
            if link is not None:
                link.inflight.answered(job)
            gone = TandemError(ErrorKind.WORKER_LOST, f"worker {ref.id} is gone")
            return self.director.on_submit_result(ref, job.key, gone, self._agenda.now)

        def answered(refusal: TandemError | None, load: WorkerLoad) -> None:
            if not link.is_live or self.workers.find(ref) is not link:
                return
            link.inflight.answered(job)
            self._take_in(link)
            link.load = load
            self.workers.changed(link)
            now = self._agenda.now
            self._execute(self.director.on_submit_result(ref, job.key, refusal, now), now)

        self._network.submit(link.worker, job, answered, self.party)
        return ()

    # ---- discovery and loss of workers

    def met(self, worker: SimWorker) -> None:
        """Add a worker that the gateway has discovered: a new worker, a new incarnation, or one that was out of reach.
        Requests that wait are placed if possible."""
        self.workers.met(worker)
        self._execute(self.director.place_queued(self._agenda.now))

    def lost(self, worker: WorkerRef, reason: str) -> None:
        """Remove a lost worker, apply the reports of it that have arrived by now, and then report the loss of the
        worker and its jobs to the director. `reason`: a text for errors."""
        link = self.workers.lost(worker)
        if link is None:
            return
        self._take_in(link)
        states = [one.state for one in self.director.requests()]
        self.catch_up([s.request.id for s in states if worker in s.workers() or s.seeks()], but=worker)
        self._execute(self.director.on_worker_lost(worker, reason, self._agenda.now))

    # ---- steps that workers took ahead of the clock

    def catch_up(self, requests: Iterable[RequestId], but: WorkerRef | None = None) -> None:
        """Apply the reports that have reached the gateway by now from the workers of these requests.

        `but`: a worker whose reports have already been applied.
        """
        for ref in [ref for request in requests for ref in self.streams.workers(request) if ref != but]:
            link = self.workers.find(ref)
            if link is not None:
                link.worker.settle()
                self._take_in(link)

    def _take_in(self, link: GatewayLink) -> None:
        """Pass the tokens of one worker's steps, as far as their reports have arrived by now, to the director and the
        clients."""
        for steps in self.workers.take_reported(link):
            times = array("d", [end + self._network.latency_s for end in steps.ends])
            for run in steps.tokens:
                if self.director.on_tokens(link.worker.ref, run.key, run.first_index, run.ids, times[-1]):
                    self.streams.deliver_run(run, times)
                    continue
                for i, token in enumerate(run.ids):
                    event = Token(run.key, run.first_index + i, SampledToken(token))
                    self._execute(self.director.on_worker_events(link.worker.ref, [event], times[i]), times[i])


def _may_end(event: JobEvent) -> bool:
    """Return whether an event may end a request for which another worker has taken steps ahead."""
    return isinstance(event, Failed | Cancelled) or (isinstance(event, Finished) and event.reason is not None)
