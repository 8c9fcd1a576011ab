"""One simulated gateway: runs real lives of requests with the real router; never decides anything about one.

It does what `gateway.dispatch` does on an event loop, with the same deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import JobEvent
from tandem.core.ids import HandoffId, JobKey, RequestId, WorkerRef
from tandem.core.load import Load
from tandem.core.request import Job
from tandem.flow.commands import CancelJob, Command, Deliver, End, Place, ReleaseLease, Submit
from tandem.flow.lifecycle import Phase, RequestLife
from tandem.kv.handoff import HandoffKey
from tandem.routing.placement import Placement
from tandem.routing.router import place
from tandem.routing.view import ClusterView, WorkerView
from tandem.sim.agenda import Agenda
from tandem.sim.delivery import Delivery
from tandem.sim.network import Network
from tandem.sim.trace import Trace
from tandem.sim.worker import FINGERPRINT, SimWorker
from tandem.workload.ask import MODEL, Ask

TICK_S = 0.05
REFUSAL_BACKOFF_S = 0.1
"""Both as the real dispatch's."""


Ended = Callable[[Trace], None]


@dataclass(eq=False, slots=True)
class _Active:
    number: int
    life: RequestLife
    trace: Trace
    ended: Ended
    came_at: float
    moved_at: float
    waiting_for: str = "a place"
    excluded_until: dict[WorkerRef, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Link:
    """What the gateway knows of a worker. `num_unreported` prompt tokens are in submits without an answer."""

    worker: SimWorker
    load: Load
    num_unreported: int = 0

    def view(self) -> WorkerView:
        worker = self.worker
        return WorkerView(worker.ref, worker.spec.pool, MODEL, FINGERPRINT, self.load, self.num_unreported)


class SimGateway:
    """A `Listener`. Every pair of workers counts as tried, as it is some seconds after a real start."""

    def __init__(
        self,
        agenda: Agenda,
        network: Network,
        workers: Sequence[SimWorker],
        config: GatewayConfig,
        delivery: Delivery,
    ) -> None:
        self._agenda = agenda
        self._network = network
        self._delivery = delivery
        self._config = config
        self._links = {worker.ref: _Link(worker, worker.engine.load()) for worker in workers}
        self._linked = _pairs(workers, config)
        self._active: dict[RequestId, _Active] = {}
        self._queued: dict[RequestId, _Active] = {}
        self._num_opened = 0
        self._is_ticking = False

    @property
    def num_queued(self) -> int:
        """Requests that wait for a place."""
        return len(self._queued)

    def check(self) -> None:
        """Nothing is open. Raises AssertionError naming what is."""
        assert not self._queued.keys() - self._active.keys(), "a request that has ended waits for a place"
        assert not self._active, f"{len(self._active)} requests have no end: {list(self._active.values())[:3]}"
        for link in self._links.values():
            assert link.num_unreported == 0, (
                f"{link.num_unreported} tokens of submits to {link.worker!r} have no answer"
            )

    def open(self, ask: Ask, ended: Ended) -> None:
        """Admit a request now; it waits in line when no worker has room, and ends at once when the line is full.
        `ended` is called once, at its end."""
        now, trace = self._agenda.now, Trace(ask)
        if len(self._queued) >= self._config.max_queued:
            trace.end(TandemError(ErrorKind.OVERLOADED, f"{self._config.max_queued} requests are waiting already"), now)
            ended(trace)
            return
        life = RequestLife(ask.request, HandoffId(f"h-{ask.request.id}"))
        active = _Active(self._num_opened, life, trace, ended, now, now)
        self._active[ask.request.id] = self._queued[ask.request.id] = active
        self._num_opened += 1
        self._place_queued()
        if not self._is_ticking:
            self._is_ticking = True
            self._agenda.after(TICK_S, "gateway looks", self._tick)

    def close(self, request: RequestId) -> None:
        """The client is gone; nothing when its request has ended."""
        active = self._active.get(request)
        if active is not None:
            self._carry_out(active, active.life.cancelled())

    def heard(self, worker: WorkerRef, events: Sequence[JobEvent], load: Load | None) -> None:
        if load is not None:
            self._links[worker].load = load
        for event in events:
            active = self._active.get(event.key.request)
            if active is not None:
                active.moved_at = self._agenda.now
                self._carry_out(active, active.life.reported(worker, event))
        if load is not None:
            self._place_queued()

    # ---- inside

    def _place_queued(self) -> None:
        """Place what waits, in the order of arrival."""
        for active in sorted(self._queued.values(), key=lambda a: a.number):
            self._place(active)

    def _place(self, active: _Active) -> None:
        now = self._agenda.now
        active.excluded_until = {w: until for w, until in active.excluded_until.items() if until > now}
        view = ClusterView(tuple(link.view() for link in self._links.values()), self._linked)
        outcome = place(view, MODEL, self._config.disaggregation, frozenset(active.excluded_until))
        if isinstance(outcome, Placement):
            active.trace.path = outcome.path
            self._carry_out(active, active.life.placed(outcome))
        else:
            active.waiting_for = outcome.reason

    def _carry_out(self, active: _Active, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Place(excluded):
                    until = self._agenda.now + REFUSAL_BACKOFF_S
                    active.excluded_until.update(dict.fromkeys(excluded, until))
                case Submit(worker, job):
                    self._submit(active, self._links[worker], job)
                case CancelJob(worker, key):
                    self._cancel(worker, key)
                case ReleaseLease(worker, lease):
                    self._release(worker, lease)
                case Deliver(token):
                    delay = self._delivery.seconds(active.life.request.id, token.index)
                    active.trace.deliver(token.token.id, self._agenda.now + delay)
                case End(outcome):
                    del self._active[active.life.request.id]
                    active.trace.end(outcome, self._agenda.now)
                    active.ended(active.trace)
        if active.life.phase is Phase.QUEUED:
            self._queued[active.life.request.id] = active
        else:
            self._queued.pop(active.life.request.id, None)

    def _cancel(self, worker: WorkerRef, key: JobKey) -> None:
        self._network.post(worker, f"cancel {key}", lambda engine, now: engine.cancel(key, now))

    def _release(self, worker: WorkerRef, key: HandoffKey) -> None:
        self._network.post(worker, f"release {key}", lambda engine, now: engine.release(key, now))

    def _submit(self, active: _Active, link: _Link, job: Job) -> None:
        """A call whose answer brings the worker's load along."""
        size, worker = len(job.request.prompt_tokens), link.worker.ref
        link.num_unreported += size

        def answered(refusal: TandemError | None, load: Load) -> None:
            link.num_unreported -= size
            link.load = load
            if refusal is not None:
                self._carry_out(active, active.life.refused(worker, job.key, refusal))
            else:
                active.moved_at = self._agenda.now
                self._carry_out(active, active.life.accepted(worker, job.key))

        def arrive() -> None:
            link.worker.submit(
                job, lambda refusal, load: self._network.send(_label(job), lambda: answered(refusal, load))
            )

        self._network.send(f"submit {type(job).__name__} {job.key} > {worker.id}", arrive)

    def _tick(self) -> None:
        self._place_queued()
        for active in list(self._active.values()):
            error = self._overdue(active)
            if error is not None:
                self._carry_out(active, active.life.failed(error))
        self._is_ticking = bool(self._active)
        if self._is_ticking:
            self._agenda.after(TICK_S, "gateway looks", self._tick)

    def _overdue(self, active: _Active) -> TandemError | None:
        """A request that is sent back to the queue does not begin its wait anew."""
        now, config = self._agenda.now, self._config
        if active.life.phase is Phase.QUEUED:
            if now - active.came_at < config.queue_timeout_s:
                return None
            reason = f"no place within {config.queue_timeout_s:g} s: {active.waiting_for}"
            return TandemError(ErrorKind.NO_WORKER, reason, retry_after_s=1.0)
        if now - active.moved_at < config.progress_timeout_s:
            return None
        return TandemError(ErrorKind.DEADLINE, f"no progress within {config.progress_timeout_s:g} s")


def _label(job: Job) -> str:
    return f"answer {job.key}"


def _pairs(workers: Sequence[SimWorker], config: GatewayConfig) -> frozenset[tuple[WorkerRef, WorkerRef]]:
    """Those that a gateway tries: none without a split, and two mixed workers only where every request is split."""
    if config.disaggregation == "off":
        return frozenset()
    pools = [(w.ref, w.spec.pool) for w in workers]
    return frozenset(
        (giver, taker)
        for giver, gives in pools
        for taker, takes in pools
        if giver != taker
        and gives != "decode"
        and takes != "prefill"
        and (gives != takes or config.disaggregation == "strict")
    )
