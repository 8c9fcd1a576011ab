"""One simulated gateway: runs real lives of requests with the real router; never decides anything about one.

It does what `gateway.dispatch` does on an event loop, with the same line and deadlines.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tandem.admission.estimate import Spent
from tandem.admission.tenant import Tenant
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Cancelled, Failed, Finished, JobEvent, Pulled, SampledToken, Token
from tandem.core.ids import BlockHash, HandoffId, HandoffKey, JobKey, RequestId, TenantId, WorkerRef
from tandem.core.load import Load
from tandem.core.request import Job, Prefill, Request, Resume
from tandem.engine.effects import Effect
from tandem.engine.engine import Engine
from tandem.flow.commands import CancelJob, Command, Deliver, End, EndChoice, Place, ReleaseLease, Score, Submit
from tandem.flow.lifecycle import Phase, RequestLife
from tandem.flow.waiting import Waiting
from tandem.kv.hashing import prompt_hashes, root_hash
from tandem.routing.roster import Roster
from tandem.routing.router import Routing
from tandem.routing.view import WorkerView
from tandem.sched.targets import NO_TARGETS, LatencyTargets
from tandem.sim.agenda import Agenda, Party
from tandem.sim.delivery import Delivery
from tandem.sim.gateway_link import GatewayLink, tried_pairs
from tandem.sim.index import SimIndex
from tandem.sim.network import Network
from tandem.sim.quotas import SimQuotas
from tandem.sim.stretch import Stretch
from tandem.sim.trace import Trace
from tandem.sim.worker import FINGERPRINT, SimWorker
from tandem.workload.ask import MODEL, Ask

TICK_S = 0.05
"""As the real dispatch's."""


Ended = Callable[[Trace], None]


@dataclass(eq=False, slots=True)
class _Active:
    life: RequestLife
    trace: Trace
    ended: Ended
    came_at: float
    moved_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Of those who ask: tenants' own, None: everybody is served alike and without limits; and what each lane was
    promised."""

    tenants: Mapping[TenantId, Tenant] | None = None
    targets: LatencyTargets = NO_TARGETS


class SimGateway:
    """A `Listener`. Every pair of workers counts as tried, as it is some seconds after a real start."""

    def __init__(
        self,
        agenda: Agenda,
        network: Network,
        workers: Sequence[SimWorker],
        config: GatewayConfig,
        delivery: Delivery,
        party: Party,
        terms: Terms,
    ) -> None:
        self.party = party
        self._agenda = agenda
        self._network = network
        self._delivery = delivery
        self._config = config
        self._links = {worker.ref: GatewayLink(worker, worker.engine.load()) for worker in workers}
        self._roster = Roster(tried_pairs(workers, config), frozenset())
        for link in self._links.values():
            self._changed(link)
        self._active: dict[RequestId, _Active] = {}
        self._quotas = SimQuotas(terms.tenants)
        self._index = SimIndex(agenda, network.index_delay_s)
        self._routing = Routing(config.routing_policy)
        self._waiting = Waiting(self._roster, config, terms.targets, self._index, self._routing)
        self._is_ticking = False

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
        for link in self._links.values():
            assert not link.decoding, f"{link.decoding} were to decode at {link.worker!r} and never taken"
            assert not link.placed, f"{link.placed} were placed at {link.worker!r} and never taken"

    def open(self, ask: Ask, ended: Ended) -> None:
        """Admit a request now; it waits in line when no worker has room, and ends at once when it is refused.
        `ended` is called once, at its end."""
        now, trace = self._agenda.now, Trace(ask)
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
                request, weight=tenant.weight, policy=tenant.disaggregation, hashes=self._names(request)
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

    def streamed(self, worker: WorkerRef, stretch: Stretch) -> None:
        self._links[worker].coming.append(stretch)

    def heard(self, worker: WorkerRef, events: Sequence[JobEvent], load: Load | None) -> None:
        link = self._links[worker]
        self._take_in(link)
        has_room = load is not None and load.may_take_more_than(link.load)
        if load is not None:
            link.load = load
            self._changed(link)
        for event in events:
            active = self._active.get(event.key.request)
            if active is not None:
                if _may_end(event):
                    self._catch_up(active, but=worker)
                active.moved_at = self._agenda.now
                self._measure(active, event)
                self._carry_out(active, active.life.reported(worker, event))
        if has_room and self._waiting.may_go_on(self._view(link)):
            self._place_queued()

    # ---- what has come in the meantime

    def _catch_up(self, active: _Active, but: WorkerRef | None = None) -> None:
        """What a request's workers have said of steps that they took ahead, as far as it has come; all of `but`'s has
        been heard."""
        for link in [self._links[worker] for worker in active.life.workers() if worker != but]:
            link.worker.settle()
            self._take_in(link)

    def _take_in(self, link: GatewayLink) -> None:
        while link.coming and (num_come := self._num_come(link, link.coming[0])):
            stretch = link.coming.popleft()
            if num_come < len(stretch.ends):
                stretch, rest = stretch.split(num_come)
                link.coming.appendleft(rest)
            self._hear_stretch(link, stretch)

    def _num_come(self, link: GatewayLink, stretch: Stretch) -> int:
        """How many of its steps the gateway has heard of."""
        agenda, delay_s, party = self._agenda, self._network.latency_s, link.worker.party
        if agenda.now > stretch.ends[-1] + delay_s:
            return len(stretch.ends)
        return bisect_left(stretch.ends, True, key=lambda end: not agenda.has_passed(end + delay_s, party))

    def _hear_stretch(self, link: GatewayLink, stretch: Stretch) -> None:
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
            self._waiting.line.drew(tokens.key.request, len(tokens.ids))
            if active.life.streamed(worker, tokens.key, tokens.first_index, len(tokens.ids)):
                reached = self._delivery.times(tokens.key.request, tokens.first_index, times)
                active.trace.deliver_all(tokens.ids, reached)
                continue
            for i, token in enumerate(tokens.ids):
                event = Token(tokens.key, tokens.first_index + i, SampledToken(token))
                self._carry_out(active, active.life.reported(worker, event), times[i])

    def _changed(self, link: GatewayLink) -> None:
        """Whatever was heard or sent, and not only that blocks were taken, as each step does."""
        self._roster.put(partial(self._view, link))

    def _view(self, link: GatewayLink) -> WorkerView:
        """As of now, without taking anything in: while a worker only decodes, blocks become fewer."""
        num_free = link.worker.num_free_seen(self._network.latency_s)
        if num_free is None:
            num_free = link.load.num_free_blocks
            for stretch in reversed(link.coming):
                num_come = self._num_come(link, stretch)
                if num_come:
                    num_free = stretch.num_free[num_come - 1]
                    break
        return link.view(num_free)

    # ---- inside

    def _names(self, request: Request) -> Sequence[BlockHash]:
        """Of its prompt's blocks. All workers have blocks of one size."""
        block_size = next(iter(self._links.values())).worker.spec.layout.block_size
        return prompt_hashes(root_hash(FINGERPRINT, block_size, request.cache_salt), request, block_size)

    def _enter(self, request: Request, trace: Trace, ended: Ended) -> None:
        now, life = self._agenda.now, RequestLife(request, HandoffId(f"h-{request.id}"))
        self._active[request.id] = _Active(life, trace, ended, now, now)

    def _refuse(self, request: RequestId, error: TandemError) -> None:
        active = self._active[request]
        self._carry_out(active, active.life.failed(error))

    def _place_queued(self) -> None:
        """Place what waits, in its turn, until the first finds no place."""
        while (turn := self._waiting.next(self._agenda.now)) is not None:
            active = self._active[turn.request]
            active.trace.path = turn.placement.path
            giver, taker = self._links[turn.placement.prefill], self._links[turn.placement.decode]
            giver.placed[turn.request] = self._waiting.line.charged(turn.request)
            taker.decoding.add(turn.request)
            self._changed(giver)
            self._changed(taker)
            self._carry_out(active, active.life.placed(turn.placement))

    def _carry_out(self, active: _Active, commands: Sequence[Command], at: float | None = None) -> None:
        """`at`: when what caused them came, if not now."""
        now = self._agenda.now
        for command in commands:
            match command:
                case Place(excluded):
                    self._waiting.refused(excluded, now)
                    self._unplace(active)
                case Submit(worker, job):
                    self._submit(active, self._links[worker], job)
                case CancelJob(worker, keys):
                    self._cancel(worker, keys)
                case ReleaseLease(worker, lease):
                    self._release(worker, lease)
                case Deliver(token):
                    delay = self._delivery.seconds(active.life.request.id, token.index)
                    active.trace.deliver(token.token.id, (now if at is None else at) + delay)
                    self._waiting.line.drew(active.life.request.id, 1)
                case Score() | EndChoice():
                    pass  # nobody reads scores, and a simulated request has one choice
                case End(outcome):
                    self._end(active, outcome)
        if active.life.phase is Phase.QUEUED:
            self._waiting.line.put_back(active.life.request.id)

    def _end(self, active: _Active, outcome: Finished | TandemError) -> None:
        now, trace = self._agenda.now, active.trace
        self._unplace(active)
        del self._active[trace.id]
        self._waiting.leave(trace.id, active.life.num_cached)
        num_output = len(trace.token_times)
        spent = Spent(trace.num_prompt - (active.life.num_cached or 0), num_output) if num_output else None
        self._quotas.settle(trace.id, active.life.request.tenant, spent, now)
        trace.end(outcome, now)
        kind = "finished" if isinstance(outcome, Finished) else outcome.kind.value
        self.party.log.note(now, f"end {trace.id} {kind} {trace.path}")
        self.party.log.note_bytes(trace.token_times.tobytes())
        active.ended(trace)

    def _unplace(self, active: _Active) -> None:
        """It does not go where it was to."""
        placement = active.life.placement
        for ref in () if placement is None else (placement.prefill, placement.decode):
            if self._links[ref].forget(active.life.request.id):
                self._changed(self._links[ref])

    def _cancel(self, worker: WorkerRef, keys: Sequence[JobKey]) -> None:
        def run(engine: Engine, now: float) -> list[Effect]:
            return [effect for key in keys for effect in engine.cancel(key, now)]

        self._network.post(worker, f"cancel {', '.join(map(str, keys))}", run, self.party)

    def _release(self, worker: WorkerRef, key: HandoffKey) -> None:
        self._network.post(worker, f"release {key}", lambda engine, now: engine.release(key, now), self.party)

    def _submit(self, active: _Active, link: GatewayLink, job: Job) -> None:
        """A call whose answer brings the worker's load along."""
        worker = link.worker

        def answered(refusal: TandemError | None, load: Load) -> None:
            if not isinstance(job, Resume):
                link.placed.pop(job.request.id, None)
            if not isinstance(job, Prefill):
                link.decoding.discard(job.request.id)
            self._take_in(link)
            link.load = load
            self._changed(link)
            if refusal is not None:
                self._carry_out(active, active.life.refused(worker.ref, job.key, refusal))
                self._place_queued()
            else:
                active.moved_at = self._agenda.now
                self._carry_out(active, active.life.accepted(worker.ref, job.key))

        def answer(refusal: TandemError | None, load: Load) -> None:
            self._network.send(f"answer {job.key}", lambda: answered(refusal, load), worker.party, self.party)

        def arrive() -> None:
            worker.submit(job, answer)

        self._network.send(f"submit {type(job).__name__} {job.key}", arrive, self.party, worker.party)

    def _measure(self, active: _Active, event: JobEvent) -> None:
        """How fast a pull was."""
        placement = active.life.placement
        if isinstance(event, Pulled) and placement is not None:
            giver, taker = (self._view(self._links[ref]) for ref in (placement.prefill, placement.decode))
            self._routing.links.observe(giver, taker, event.num_bytes, event.busy_s)

    def _tick(self) -> None:
        self._index.collect(link.worker for link in self._links.values())
        for active in list(self._active.values()):
            error = self._overdue(active)
            if error is not None:
                self._carry_out(active, active.life.failed(error))
        self._place_queued()
        self._is_ticking = bool(self._active)
        if self._is_ticking:
            self._agenda.after(TICK_S, "", self._tick, by=self.party)

    def _overdue(self, active: _Active) -> TandemError | None:
        """A request that is sent back to the queue does not begin its wait anew."""
        now, config = self._agenda.now, self._config
        if active.life.phase is Phase.QUEUED:
            if now - active.came_at < config.queue_timeout_s:
                return None
            reason = f"no place within {config.queue_timeout_s:g} s: {self._waiting.why(MODEL)}"
            return TandemError(ErrorKind.NO_WORKER, reason, retry_after_s=1.0)
        if now - active.moved_at >= config.progress_timeout_s:
            self._catch_up(active)
        if now - active.moved_at < config.progress_timeout_s:
            return None
        return TandemError(ErrorKind.DEADLINE, f"no progress within {config.progress_timeout_s:g} s")


def _may_end(event: JobEvent) -> bool:
    """Whether it may end a request for which another worker has steps ahead."""
    return isinstance(event, Failed | Cancelled) or (isinstance(event, Finished) and event.reason is not None)
