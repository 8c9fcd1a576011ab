"""Carries messages between workers and to the gateway, each after a latency, and starts reads; never drops one and
never decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tandem.core.events import JobEvent
from tandem.core.ids import HandoffKey, WorkerRef
from tandem.core.load import Load
from tandem.engine.effects import Announce, Effect, Emit, EndHandoff, Follow, Renew, Take, Unfollow
from tandem.engine.engine import Engine
from tandem.kv.pull_book import StartRead, Teardown
from tandem.sim.agenda import Action, Agenda, Party
from tandem.sim.stretch import Stretch
from tandem.sim.transport import Fabric
from tandem.sim.worker import Command, SimWorker


class Listener(Protocol):
    """Who hears what workers report, and learns how full they are. `streamed` is told at once what arrives later: the
    ends of steps plus the latency say when."""

    @property
    def party(self) -> Party: ...

    def streamed(self, worker: WorkerRef, stretch: Stretch) -> None: ...

    def heard(self, worker: WorkerRef, events: Sequence[JobEvent], load: Load | None) -> None: ...


class Network:
    """An `Outlet`. `latency_s` is one way, and the same between all, so messages of one sender keep their order."""

    def __init__(self, agenda: Agenda, fabric: Fabric, latency_s: float) -> None:
        self._agenda = agenda
        self._fabric = fabric
        self._latency_s = latency_s
        self._workers: dict[WorkerRef, SimWorker] = {}
        self._listener: Listener | None = None

    def attach(self, workers: Iterable[SimWorker], listener: Listener) -> None:
        """Who can be reached; before anything is sent."""
        self._workers = {worker.ref: worker for worker in workers}
        self._listener = listener
        for worker in self._workers.values():
            self._fabric.add(worker.ref, worker.spec.bandwidth, worker.party)

    @property
    def latency_s(self) -> float:
        return self._latency_s

    def send(self, label: str, action: Action, by: Party, to: Party) -> None:
        """Do something at the other end."""
        self._agenda.after(self._latency_s, label, action, by=by, to=to)

    def post(self, worker: WorkerRef, label: str, command: Command, by: Party) -> None:
        """Run a command at a worker, between two of its steps."""
        taker = self._workers[worker]
        self.send(label, lambda: taker.post(command), by, taker.party)

    def dispatch(self, worker: SimWorker, effects: Sequence[Effect], load: Load | None) -> None:
        """Events go to the gateway in one message, with the load if it has changed."""
        events = tuple(effect.event for effect in effects if isinstance(effect, Emit))
        listener = self._listener
        assert listener is not None, "nobody listens"
        self.send("", lambda: listener.heard(worker.ref, events, load), worker.party, listener.party)
        for effect in effects:
            self._carry(worker, effect)

    def stream(self, worker: SimWorker, stretch: Stretch) -> None:
        """What the steps of a run have yielded."""
        assert self._listener is not None, "nobody listens"
        self._listener.streamed(worker.ref, stretch)

    # ---- inside

    def _carry(self, worker: SimWorker, effect: Effect) -> None:
        by = worker.party
        match effect:
            case Emit():
                pass
            case Announce(taker, message):
                label = f"announce {message.key} {message.num_computed}"
                self.post(taker, label, lambda engine, now: engine.announced(message, now), by)
            case EndHandoff(taker, key, kind, text):
                self.post(taker, f"end {key}", lambda engine, now: engine.handoff_ended(key, kind, text, now), by)
            case Follow(source, key):
                self._ask(worker, source, (key,), f"follow {key}", lambda e, now: e.follow(key, worker.ref, now))
            case Renew(source, keys):
                self._ask(worker, source, keys, "renew", lambda e, now: e.renew(keys, worker.ref, now))
            case Take(source, key, num_known):
                self.post(source, f"take {key}", lambda engine, now: _take(engine, key, num_known), by)
            case Unfollow(source, key, is_taken):
                label = f"{'taken' if is_taken else 'release'} {key}"
                self.post(source, label, lambda engine, now: engine.release(key, now, is_taken=is_taken), by)
            case StartRead():
                self._read(worker, effect)
            case Teardown(source):
                self._tear_down(worker, source)

    def _ask(self, taker: SimWorker, source: WorkerRef, keys: tuple[HandoffKey, ...], label: str, ask: Command) -> None:
        """A message whose answer says that the lease goes on, counted from when it was sent."""
        sent_at = self._agenda.now
        giver = self._workers[source]
        lease_s = giver.spec.config.handoff.lease_s

        def renewed(engine: Engine, now: float) -> Sequence[Effect]:
            engine.renewed(keys, sent_at, lease_s)
            return ()

        def hear(engine: Engine, now: float) -> Sequence[Effect]:
            effects = ask(engine, now)
            self.post(taker.ref, f"{label} heard", renewed, giver.party)
            return effects

        self.post(source, label, hear, taker.party)

    def _read(self, worker: SimWorker, read: StartRead) -> None:
        num_bytes = len(read.local) * worker.spec.layout.block_bytes

        def done() -> None:
            worker.post(lambda engine, now: engine.read_done(read.read, now))

        self._fabric.read(read.source, worker.ref, num_bytes, done)

    def _tear_down(self, worker: SimWorker, source: WorkerRef) -> None:
        """The transport forgets the peer with all its reads, which proves that none touches a block any more."""
        self._fabric.cut(source, worker.ref)
        text = "torn down"
        self.post(worker.ref, text, lambda e, now: e.peer_lost(source, text, proven=True, now=now), worker.party)


def _take(engine: Engine, key: HandoffKey, num_known: int) -> Sequence[Effect]:
    engine.take(key, num_known)
    return ()
