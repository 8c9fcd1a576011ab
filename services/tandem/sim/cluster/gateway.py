"""Drive a `RequestDirector` under the virtual clock: one simulated gateway."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tandem.admission.tenant_quota_state import QuotaReservation
from tandem.core.errors import TandemError
from tandem.core.events import Finished, PromptLogprobs, Token
from tandem.core.ids import HandoffId, RequestId
from tandem.core.request import Request
from tandem.orchestration import commands
from tandem.orchestration.director import TICK_S, AdmittedRequest, RequestDirector
from tandem.routing.placement import Placement
from tandem.routing.worker_view import Pair
from tandem.sim.cluster.client_trace import ClientStreams, ClientTrace, Delivery, Ended
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.network import Network
from tandem.sim.cluster.quotas import SimQuotas
from tandem.sim.cluster.worker import SimWorker
from tandem.sim.cluster.worker_pool import SimWorkerPool
from tandem.sim.cluster.worker_reports import WorkerReports
from tandem.sim.kernel.event_queue import Actor, SimEventQueue
from tandem.workload.scheduled_request import ScheduledRequest


class SimGateway:
    """Represent one simulated gateway: a director, the workers that it knows, and the streams of its open requests. KV
    may move between all `workers`, those at the start of the run, without a probe."""

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
        self.reports = WorkerReports(agenda, network, party, self.director, self.workers, self.streams, self.execute)
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
            self.streams.open(admitted.open_request, trace, ended, quota)
            self._begin(admitted)

    def close(self, request: RequestId) -> None:
        """End a request whose client has disconnected; do nothing when the request has ended."""
        self.reports.catch_up([request])
        self.execute(self.director.cancel(request, self._agenda.now))

    def execute(self, pending: Iterable[commands.Command], at: float | None = None) -> None:
        """Carry out commands of the director. `at`: virtual time of the event that caused them; None: now."""
        now, queue = self._agenda.now if at is None else at, deque(pending)
        while queue:
            match queue.popleft():
                case Token() as token:
                    self.streams.deliver(token, now)
                case commands.SubmitJob(worker, job):
                    queue.extend(self.reports.submit(worker, job))
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

    def _begin(self, admitted: AdmittedRequest) -> None:
        self.execute(admitted.commands)
        if not self._is_ticking:
            self._is_ticking = True
            self._agenda.after(TICK_S, "", self._tick, by=self.party)

    def _probe(self, pair: Pair, request: Request) -> None:
        admitted = self.director.probe(request, Placement(*pair), self._agenda.now)

        def ended(_: ClientTrace) -> None:
            self.workers.probed(pair, moved=admitted.open_request.state.pulled is not None)
            self.execute(self.director.place_queued(self._agenda.now))

        trace = ClientTrace(ScheduledRequest(request, "", self._agenda.now))
        self.streams.open(admitted.open_request, trace, ended, None)
        self._begin(admitted)

    def _tick(self) -> None:
        self._network.index.collect(link.worker for link in self.workers.links())
        self.reports.catch_up(self.director.overdue(self._agenda.now))
        self.execute(self.director.on_timer(self._agenda.now))
        self.execute(self.director.rebalance(self._agenda.now))
        self._is_ticking = bool(len(self.streams))
        if self._is_ticking:
            self._agenda.after(TICK_S, "", self._tick, by=self.party)
