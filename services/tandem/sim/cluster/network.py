"""Carries messages between workers and to the gateways, each after a latency, and starts reads; never decides.

A link between two parties may be cut: what would have come over it waits until it is mended, or is lost with the
connection when one of the two gives it up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from tandem.core.events import JobEvent
from tandem.core.ids import HandoffKey, WorkerRef
from tandem.core.worker_load import WorkerLoad
from tandem.engine.effects import (
    Effect,
    FollowHandoff,
    JobEnded,
    ReleaseHandoff,
    RenewLeases,
    SendAnnouncement,
    SendEvent,
    SendHandoffEnded,
    SendRemainderRequest,
)
from tandem.engine.engine import Engine
from tandem.kv.pull_actions import StartRead, TearDownProducer
from tandem.sim.cluster.fabric import Fabric
from tandem.sim.cluster.lookahead import StepRun
from tandem.sim.cluster.prefix_index import SimIndex
from tandem.sim.cluster.worker import Command, SimWorker
from tandem.sim.kernel.event_queue import Action, Actor, SimEventQueue


class Listener(Protocol):
    """Who hears what workers report, and learns how full they are. `streamed` is told at once what arrives later: the
    ends of steps plus the latency say when."""

    @property
    def party(self) -> Actor: ...

    def streamed(self, worker: WorkerRef, stretch: StepRun) -> None: ...

    def heard(self, worker: WorkerRef, events: Sequence[JobEvent], load: WorkerLoad | None) -> None: ...


Link = frozenset[int]
"""The ranks of two parties."""
UNREACHABLE_S = 0.4
"""A consumer's tries to reach a source at whose address nobody is."""


def _link(one: Actor, other: Actor) -> Link:
    return frozenset((one.rank, other.rank))


class Network:
    """An `Outlet`. `latency_s` is one way, and the same between all, so messages of one sender keep their order.
    `index`: what all gateways know of prefix caches."""

    def __init__(self, agenda: SimEventQueue, fabric: Fabric, latency_s: float, index: SimIndex) -> None:
        self._agenda = agenda
        self._fabric = fabric
        self._latency_s = latency_s
        self.index = index
        self._workers: dict[WorkerRef, SimWorker] = {}
        self._listeners: tuple[Listener, ...] = ()
        self._cut: dict[Link, deque[tuple[Action, Actor, Actor]]] = {}

    def attach(self, workers: Iterable[SimWorker], listeners: Iterable[Listener]) -> None:
        """Who can be reached; before anything is sent."""
        self._listeners = tuple(listeners)
        for worker in workers:
            self.add(worker)

    def add(self, worker: SimWorker) -> None:
        """One that came later."""
        self._workers[worker.ref] = worker
        self._fabric.add(worker.ref, worker.spec.bandwidth, worker.party)

    @property
    def latency_s(self) -> float:
        return self._latency_s

    def send(self, label: str, action: Action, by: Actor, to: Actor) -> None:
        """Do something at the other end."""
        self._agenda.after(self._latency_s, label, lambda: self._arrive(action, by, to), by=by, to=to)

    def cut(self, one: Actor, other: Actor) -> None:
        """Nothing passes between the two; nobody is told."""
        self._cut.setdefault(_link(one, other), deque())

    def is_cut(self, one: Actor, other: Actor) -> bool:
        return _link(one, other) in self._cut

    def drop(self, one: Actor, other: Actor) -> None:
        """A connection that is cut was given up: what waits on it never comes."""
        self._cut[_link(one, other)].clear()

    def mend(self, one: Actor, other: Actor) -> None:
        """What has waited comes now, in its order, if there still is somebody to whom."""
        for action, by, to in self._cut.pop(_link(one, other), ()):
            self._agenda.after(0.0, "", action, by=by, to=to)

    def post(self, worker: WorkerRef, label: str, command: Command, by: Actor) -> None:
        """Run a command at a worker, between two of its steps."""
        consumer = self._workers[worker]
        self.send(label, lambda: consumer.post(command), by, consumer.party)

    def dispatch(self, worker: SimWorker, effects: Sequence[Effect], load: WorkerLoad | None) -> None:
        """Events go to the gateway in one message, with the load if it has changed."""
        assert self._listeners, "nobody listens"
        events = tuple(effect.event for effect in effects if isinstance(effect, SendEvent))
        for listener in self._listeners:
            self.send("", partial(listener.heard, worker.ref, events, load), worker.party, listener.party)
        for effect in effects:
            self._carry(worker, effect)

    def stream(self, worker: SimWorker, stretch: StepRun) -> None:
        """What the steps of a run have yielded."""
        for listener in self._listeners:
            listener.streamed(worker.ref, stretch)

    # ---- inside

    def _arrive(self, action: Action, by: Actor, to: Actor) -> None:
        held = self._cut.get(_link(by, to)) if self._cut else None
        if held is None:
            action()
        else:
            held.append((action, by, to))

    def _carry(self, worker: SimWorker, effect: Effect) -> None:
        by = worker.party
        match effect:
            case SendEvent() | JobEnded():
                pass
            case SendAnnouncement(consumer, message):
                label = f"announce {message.key} {message.num_computed}"
                self.post(consumer, label, lambda engine, now: engine.announced(message, now), by)
            case SendHandoffEnded(consumer, key, kind, text):
                self.post(consumer, f"end {key}", lambda engine, now: engine.handoff_ended(key, kind, text, now), by)
            case FollowHandoff(source, key, prefix_request):
                label = f"{'follow' if prefix_request is None else 'borrow'} {key}"
                self._ask(worker, source, (key,), label, lambda e, now: e.follow(key, worker.ref, now, prefix_request))
            case RenewLeases(source, keys):
                self._ask(worker, source, keys, "renew", lambda e, now: e.renew(keys, worker.ref, now))
            case SendRemainderRequest(source, key, num_known):
                self.post(source, f"take {key}", lambda engine, now: _take(engine, key, num_known), by)
            case ReleaseHandoff(source, key, is_taken):
                label = f"{'taken' if is_taken else 'release'} {key}"
                self.post(source, label, lambda engine, now: engine.release(key, now, is_taken=is_taken), by)
            case StartRead():
                self._read(worker, effect)
            case TearDownProducer(source):
                self._tear_down(worker, source)

    def _ask(
        self, consumer: SimWorker, source: WorkerRef, keys: tuple[HandoffKey, ...], label: str, ask: Command
    ) -> None:
        """A message whose answer says that the lease goes on, counted from when it was sent."""
        sent_at = self._agenda.now
        producer = self._workers[source]
        if producer.party.is_gone:
            text = "nothing answers at its address"
            lost = partial(consumer.post, lambda engine, now: engine.source_lost(source, text, now))
            self._agenda.after(UNREACHABLE_S, "", lost, by=consumer.party)
            return
        lease_s = producer.spec.config.handoff.lease_s

        def renewed(engine: Engine, now: float) -> Sequence[Effect]:
            engine.renewed(keys, sent_at, lease_s)
            return ()

        def hear(engine: Engine, now: float) -> Sequence[Effect]:
            effects = ask(engine, now)
            self.post(consumer.ref, f"{label} heard", renewed, producer.party)
            return effects

        self.post(source, label, hear, consumer.party)

    def _read(self, worker: SimWorker, read: StartRead) -> None:
        num_bytes = len(read.local) * worker.spec.layout.block_bytes

        def done() -> None:
            worker.post(lambda engine, now: engine.read_done(read.read, now))

        def lost() -> None:
            text = "its source is gone"
            worker.post(lambda engine, now: engine.read_failed(read.read, text, drained=True, now=now))

        if self._workers[read.source].party.is_gone:
            self._agenda.after(UNREACHABLE_S, "", lost, by=worker.party)
        else:
            self._fabric.read(read.source, worker.ref, num_bytes, done, lost)

    def _tear_down(self, worker: SimWorker, source: WorkerRef) -> None:
        """The transport forgets the peer with all its reads, which proves that none touches a block any more."""
        self._fabric.cut(source, worker.ref)
        text = "torn down"
        self.post(worker.ref, text, lambda e, now: e.peer_lost(source, text, proven=True, now=now), worker.party)


def _take(engine: Engine, key: HandoffKey, num_known: int) -> Sequence[Effect]:
    engine.request_remainder(key, num_known)
    return ()
