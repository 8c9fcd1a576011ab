"""Carries messages between workers and to the gateway, each after a latency, and starts reads; never drops one and
never decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tandem.core.events import JobEvent
from tandem.core.ids import WorkerRef
from tandem.core.load import Load
from tandem.engine.effects import Announce, Effect, Emit, EndHandoff, Follow, Renew, Unfollow
from tandem.engine.engine import Engine
from tandem.kv.handoff import HandoffKey
from tandem.kv.pull_book import StartRead, Teardown
from tandem.sim.agenda import Action, Agenda
from tandem.sim.transport import Fabric
from tandem.sim.worker import Command, SimWorker


class Listener(Protocol):
    """Who hears what workers report, and learns how full they are."""

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
            self._fabric.add(worker.ref, worker.spec.bandwidth)

    def send(self, label: str, action: Action) -> None:
        """Do something at the other end."""
        self._agenda.after(self._latency_s, label, action)

    def post(self, worker: WorkerRef, label: str, command: Command) -> None:
        """Run a command at a worker, between two of its steps."""
        self.send(f"{label} > {worker.id}", lambda: self._workers[worker].post(command))

    def dispatch(self, worker: SimWorker, effects: Sequence[Effect], load: Load | None) -> None:
        """Events go to the gateway in one message, with the load if it has changed."""
        events = tuple(effect.event for effect in effects if isinstance(effect, Emit))
        listener = self._listener
        assert listener is not None, "nobody listens"
        self.send(f"{worker.ref.id} reports {len(events)} {load}", lambda: listener.heard(worker.ref, events, load))
        for effect in effects:
            self._carry(worker, effect)

    # ---- inside

    def _carry(self, worker: SimWorker, effect: Effect) -> None:
        match effect:
            case Emit():
                pass
            case Announce(taker, message):
                label = f"announce {message.key} {message.num_computed}"
                self.post(taker, label, lambda engine, now: engine.announced(message, now))
            case EndHandoff(taker, key, kind, text):
                self.post(taker, f"end {key}", lambda engine, now: engine.handoff_ended(key, kind, text, now))
            case Follow(source, key):
                self._ask(worker.ref, source, (key,), f"follow {key}", lambda e, now: e.follow(key, worker.ref, now))
            case Renew(source, keys):
                self._ask(worker.ref, source, keys, "renew", lambda e, now: e.renew(keys, worker.ref, now))
            case Unfollow(source, key):
                self.post(source, f"release {key}", lambda engine, now: engine.release(key, now))
            case StartRead():
                self._read(worker, effect)
            case Teardown(source):
                self._tear_down(worker, source)

    def _ask(self, taker: WorkerRef, source: WorkerRef, keys: tuple[HandoffKey, ...], label: str, ask: Command) -> None:
        """A message whose answer says that the lease goes on, counted from when it was sent."""
        sent_at = self._agenda.now
        lease_s = self._workers[source].spec.config.handoff.lease_s

        def renewed(engine: Engine, now: float) -> Sequence[Effect]:
            engine.renewed(keys, sent_at, lease_s)
            return ()

        def hear(engine: Engine, now: float) -> Sequence[Effect]:
            effects = ask(engine, now)
            self.post(taker, f"{label} heard", renewed)
            return effects

        self.post(source, label, hear)

    def _read(self, worker: SimWorker, read: StartRead) -> None:
        num_bytes = len(read.local) * worker.spec.layout.block_bytes

        def done() -> None:
            worker.post(lambda engine, now: engine.read_done(read.read, now))

        self._fabric.read(read.source, worker.ref, num_bytes, done)

    def _tear_down(self, worker: SimWorker, source: WorkerRef) -> None:
        """The transport forgets the peer with all its reads, which proves that none touches a block any more."""
        self._fabric.cut(source, worker.ref)
        self.post(worker.ref, "torn down", lambda e, now: e.peer_lost(source, "torn down", proven=True, now=now))
