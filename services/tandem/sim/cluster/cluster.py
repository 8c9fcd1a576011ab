"""Compose a simulated cluster of workers in pools, gateways and a network, and run a workload on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count

from tandem.core.events import Finished, Token
from tandem.core.ids import RequestId, TenantId
from tandem.core.request import Request
from tandem.scaling.demand_totals import QueueBacklog, sum_backlogs
from tandem.sim.cluster.client_trace import ClientTrace, ignore
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.fabric import Fabric
from tandem.sim.cluster.faults import Fault, Faults
from tandem.sim.cluster.gateway import SimGateway
from tandem.sim.cluster.network import Network
from tandem.sim.cluster.prefix_index import SimIndex
from tandem.sim.cluster.worker import SimWorker, WorkerSpec
from tandem.sim.cluster.worker_lifecycle import WorkerLifecycle
from tandem.sim.cluster.worker_pool import PROBE
from tandem.sim.kernel.event_queue import Actor, SimEventQueue, combined
from tandem.workload import seeded_random
from tandem.workload.scheduled_request import MODEL, ScheduledRequest


class SimCluster:
    """Build one simulated cluster and run a workload on it; a cluster can run once.

    Equal specs and workloads give equal values of `digest`, regardless of how many steps workers compute ahead of the
    clock.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self._agenda = SimEventQueue()
        self._clients = Actor(0)
        self.fabric = Fabric(self._agenda, spec.read_latency_s)
        self._network = Network(self._agenda, self.fabric, spec.latency_s, SimIndex(self._agenda, spec.index_delay_s))
        self._seed = spec.seed
        self._ranks = count(1 + spec.num_gateways)
        self._numbers = count()
        self.workers = [self._new_worker(kind) for kind, number in spec.workers for _ in range(number)]
        self._gateways = [
            SimGateway(self._agenda, self._network, self.workers, spec, Actor(1 + i)) for i in range(spec.num_gateways)
        ]
        self._network.attach(self.workers, [gateway.reports for gateway in self._gateways])
        self.gone: list[SimWorker] = []
        """Workers that were drained, in the order of their ends."""
        self.on_preempted: Callable[[RequestId], None] = ignore
        """Called with each request that a worker has preempted after its first output token, at the time at which the
        report reaches the request's gateway. Set it before `run`."""
        self.retry: Callable[[ScheduledRequest, ClientTrace], ScheduledRequest | None] = ignore
        """Returns what the client of a request that has failed or was closed sends in its place; None: nothing."""
        self._num_open = 0
        """Requests that are running or scheduled."""
        self._lives = WorkerLifecycle(self._agenda, self.fabric, self._network, self.workers, self._gateways)
        self._faults = Faults(self._lives, spec.gateway, self._gateway_of, self._revive)

    @property
    def now(self) -> float:
        return self._agenda.now

    @property
    def digest(self) -> str:
        """Return a hash of everything that happened in the run; two runs with equal hashes did the same."""
        parties = (
            self._clients, *(gateway.party for gateway in self._gateways), *(worker.party for worker in self.workers),
            *(worker.party for worker in self.gone),
        )  # fmt: skip
        return combined(party.log for party in parties)

    @property
    def num_events(self) -> int:
        return self._agenda.num_run

    @property
    def num_remote_hit_tokens(self) -> int:
        """Return the number of prompt tokens whose KV was read from other workers' prefix caches."""
        return sum(worker.engine.load().num_remote_hit_tokens for worker in self.workers)

    @property
    def num_queued(self) -> int:
        """Return the number of requests that wait at the gateways for a placement."""
        return sum(len(gateway.director.queue) for gateway in self._gateways)

    def num_kv_tokens(self) -> Counter[TenantId]:
        """Return, by tenant, how many tokens of KV the requests at workers need: their prompts, and the output so far
        of choices that have not ended. A prefix that several requests share counts for each of them."""
        found: Counter[TenantId] = Counter()
        for open_request in (one for gateway in self._gateways for one in gateway.director.requests()):
            if open_request.fixed_placement is None and not open_request.is_queued:
                found[open_request.state.request.tenant] += open_request.state.num_context
        return found

    def backlog(self) -> QueueBacklog:
        """Return how many requests wait at the gateways for a placement, and how many tokens their prompts have."""
        return sum_backlogs(gateway.director.backlog().get(MODEL, QueueBacklog()) for gateway in self._gateways)

    def open_traces(self) -> list[ClientTrace]:
        """Return the traces of the open requests, with all tokens that their clients have received by now."""
        found: list[ClientTrace] = []
        for gateway in self._gateways:
            traces = gateway.streams.traces()
            gateway.reports.catch_up(trace.id for trace in traces)
            found += traces
        return found

    def close(self, request: RequestId) -> None:
        """Disconnect the client of a request as the next event of the run."""
        self._close([(self.now, request)])

    def run(
        self,
        requests: Iterable[ScheduledRequest],
        ended: Callable[[ClientTrace], None],
        closed_at: Iterable[tuple[float, RequestId]] = (),
        faults: Sequence[Fault] = (),
        delivered: Callable[[Token], None] = ignore,
        sent: Callable[[ScheduledRequest], None] = ignore,
        computed: Callable[[Request, int], None] = ignore,
    ) -> None:
        """Send the requests and their follow-up turns at their due times, and return when no event is left.

        - `requests`: in the order of their due times. `closed_at`: pairs of a virtual time and a request whose client
          disconnects at that time. `faults`: faults to inject.
        - `sent`: called with each request when it is sent. `computed`: called with a request and the number of its
          cached tokens when its prompt was computed. `ended`: called with the trace of each request at its end.
        - `delivered`: called with each token that a worker reports alone. Tokens of steps that a worker computed ahead
          of the clock are reported together and left out; there are none of these where `WorkerSpec.max_run` is 1.
        """
        upcoming = iter(requests)

        def schedule(scheduled: ScheduledRequest | None, *, is_opening: bool) -> None:
            if scheduled is not None:
                self._num_open += 1
                label, to = f"ask {scheduled.request.id}", self._gateway_of(scheduled.request.id).party
                self._agenda.at(
                    scheduled.due_s, label, partial(send, scheduled, is_opening=is_opening), by=self._clients, to=to
                )

        def send(scheduled: ScheduledRequest, *, is_opening: bool) -> None:
            sent(scheduled)
            self._gateway_of(scheduled.request.id).open(scheduled, partial(over, scheduled))
            if is_opening:
                schedule(next(upcoming, None), is_opening=True)

        def over(scheduled: ScheduledRequest, trace: ClientTrace) -> None:
            ended(trace)
            self._num_open -= 1
            if not isinstance(trace.outcome, Finished):
                schedule(self.retry(scheduled, trace), is_opening=False)
            elif scheduled.follow is not None:
                schedule(scheduled.follow(trace.tokens or (), trace.ended_at), is_opening=False)

        for gateway in self._gateways:
            gateway.streams.delivered = delivered
            gateway.streams.computed = computed
            gateway.workers.goes_on = lambda: self._num_open > 0
            gateway.reports.on_preempted = self.on_preempted
        self._close(closed_at)
        self._faults.schedule(faults, self._clients)
        schedule(next(upcoming, None), is_opening=True)
        self._agenda.run()

    # ---- changes of the set of workers

    def repeat(self, action: Callable[[], float]) -> None:
        """Call `action` as the next event of the run, and call it again each time after the number of seconds that it
        returned, as long as a request is open or due."""

        def look() -> None:
            seconds = action()
            if self._num_open:
                self.after(seconds, look)

        self.after(0.0, look)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._agenda.after(seconds, "", action, by=self._clients)

    def start(self, kind: WorkerSpec) -> SimWorker:
        """Start a worker with the spec `kind` and return it; it gets requests as soon as gateways have found it."""
        worker = self._new_worker(kind)
        self.workers.append(worker)
        self._lives.begin(worker, self._clients)
        return worker

    def drain(self, worker: SimWorker, within_s: float, ended: Callable[[], None]) -> None:
        """Drain a worker: it ends when all its jobs have ended or migrated, at the latest after `within_s` seconds.

        `ended` is called at that time; this method does not wait.
        """

        def left() -> None:
            self.workers.remove(worker)
            self.gone.append(worker)
            ended()

        self._lives.drain(worker, self.now + within_s, self._clients, left)

    def _close(self, closed_at: Iterable[tuple[float, RequestId]]) -> None:
        for time, request in closed_at:
            gateway = self._gateway_of(request)
            action = partial(gateway.close, request)
            self._agenda.at(time, f"close {request}", action, by=self._clients, to=gateway.party)

    def check(self) -> None:
        """Raise AssertionError naming a request, read or KV block that is left over after a run."""
        for gateway in self._gateways:
            gateway.check()
        assert self.fabric.num_reads == 0, f"{self.fabric.num_reads} reads have no end"
        for worker in self.workers:
            worker.engine.check()
            books = worker.engine.books()
            assert worker.is_idle, f"{worker!r} is not idle"
            assert books.num_free_blocks == books.num_blocks, f"{worker!r} holds blocks: {books}"
            assert not (books.num_sequences or books.num_leases or books.num_pulls), f"{worker!r}: {books}"

    def _gateway_of(self, request: RequestId) -> SimGateway:
        """Return the gateway of a request or of a probe, which is the same for all its calls."""
        if request.startswith(PROBE):
            return self._gateways[int(request.split("-")[1]) - 1]
        return self._gateways[seeded_random.integer(0, len(self._gateways) - 1, self._seed, "gateway", request)]

    def _revive(self, worker: SimWorker) -> SimWorker:
        """Return a new incarnation of a worker that has ended; only the name and the spec stay."""
        return self._new_worker(worker.spec, worker.ref.id, worker.ref.incarnation + 1)

    def _new_worker(self, kind: WorkerSpec, name: str = "", life: int = 1) -> SimWorker:
        """Build an incarnation of the worker `name`, or of a worker with a new name."""
        name = name or f"{kind.pool}-{next(self._numbers)}"
        return SimWorker(self._agenda, kind, name, self._network, self._seed, Actor(next(self._ranks)), life)
