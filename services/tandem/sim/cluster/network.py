"""Carry messages between workers and to the gateways, each after a latency, and start KV reads.

A connection between two actors may be cut: its messages wait until the connection is mended, or are lost when one of
the two gives the connection up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from tandem.core.errors import TandemError
from tandem.core.events import JobEvent
from tandem.core.ids import HandoffKey, JobKey, WorkerRef
from tandem.core.request import Job
from tandem.core.worker_load import WorkerLoad
from tandem.engine.effects import (
    Effect,
    FollowHandoff,
    ReadFiles,
    ReleaseHandoff,
    RenewLeases,
    SendAnnouncement,
    SendHandoffEnded,
    SendRemainderRequest,
    StartRead,
    TearDownPeer,
    WriteFiles,
)
from tandem.engine.engine import Engine
from tandem.orchestration.commands import CancelJob, OfferMigration, ReleaseLease, WorkerOrder
from tandem.sim.cluster.fabric import Fabric
from tandem.sim.cluster.files import SimFiles
from tandem.sim.cluster.prefix_index import SimIndex
from tandem.sim.cluster.worker import Answer, Command, SimWorker, StepRun
from tandem.sim.kernel.event_queue import Action, Actor, SimEventQueue


class Listener(Protocol):
    """Interface through which a gateway receives workers' reports.

    `on_worker_events` receives events and loads when they arrive. `streamed` receives reports of steps before they
    arrive: each step counts as reported when the latency has passed since the end of the step.
    """

    @property
    def party(self) -> Actor: ...

    def streamed(self, worker: WorkerRef, steps: StepRun) -> None: ...

    def on_worker_events(self, worker: WorkerRef, events: Sequence[JobEvent], load: WorkerLoad | None) -> None: ...


Link = frozenset[int]
"""The ranks of the two actors of a connection."""
UNREACHABLE_S = 0.4
"""Seconds after which a consumer gives up connecting to a source that is gone."""


def _link(one: Actor, other: Actor) -> Link:
    return frozenset((one.rank, other.rank))


class Network:
    """Carry messages between gateways and workers over connections that may be cut; implements `Outlet` for the
    workers.

    `latency_s`: seconds of a message in one direction. It is the same between all actors, so that messages of one
    sender keep their order. `index`: the prefix index of all gateways.
    """

    def __init__(self, agenda: SimEventQueue, fabric: Fabric, latency_s: float, index: SimIndex) -> None:
        self._agenda = agenda
        self._fabric = fabric
        self.latency_s = latency_s
        self.index = index
        self._workers: dict[WorkerRef, SimWorker] = {}
        self._files = SimFiles(agenda, self._workers)
        self._listeners: tuple[Listener, ...] = ()
        self._cut: dict[Link, deque[tuple[Action, Actor, Actor]]] = {}

    def attach(self, workers: Iterable[SimWorker], listeners: Iterable[Listener]) -> None:
        """Set the workers and the listeners to which messages can be sent; must be called before anything is sent."""
        self._listeners = tuple(listeners)
        for worker in workers:
            self.add(worker)

    def add(self, worker: SimWorker) -> None:
        """Add a worker that can be reached from now on."""
        self._workers[worker.ref] = worker
        self._files.add(worker)
        self._fabric.add(worker.ref, worker.spec.bandwidth, worker.party)

    def send(self, label: str, action: Action, by: Actor, to: Actor) -> None:
        """Run `action` at the actor `to` after the latency. If the connection from the actor `by` is cut at that time,
        `action` runs when the connection is mended."""
        self._agenda.after(self.latency_s, label, lambda: self._arrive(action, by, to), by=by, to=to)

    def cut(self, one: Actor, other: Actor) -> None:
        """Hold all messages between two actors from now until `mend`; neither of the actors is notified."""
        self._cut.setdefault(_link(one, other), deque())

    def is_cut(self, one: Actor, other: Actor) -> bool:
        return _link(one, other) in self._cut

    def drop(self, one: Actor, other: Actor) -> None:
        """Drop the messages that wait on a cut connection, because one end has closed the connection."""
        self._cut[_link(one, other)].clear()

    def mend(self, one: Actor, other: Actor) -> None:
        """Mend a cut connection: its waiting messages arrive now, in their order; messages to an actor that is gone are
        lost."""
        for action, by, to in self._cut.pop(_link(one, other), ()):
            self._agenda.after(0.0, "", action, by=by, to=to)

    def post(self, worker: WorkerRef, label: str, command: Command, by: Actor) -> None:
        """Send a command from the actor `by` to a worker, which runs it at its engine between two steps."""
        consumer = self._workers[worker]
        self.send(label, lambda: consumer.post(command), by, consumer.party)

    def submit(self, worker: SimWorker, job: Job, answered: Answer, by: Actor) -> None:
        """Submit a job to a worker; `answered` is called with the error, or None where the worker accepts the job, and
        with the worker's load."""

        def answer(refusal: TandemError | None, load: WorkerLoad) -> None:
            self.send(f"answer {job.key}", lambda: answered(refusal, load), worker.party, by)

        self.send(f"submit {type(job).__name__} {job.key}", lambda: worker.submit(job, answer), by, worker.party)

    def send_order(self, order: WorkerOrder, by: Actor) -> None:
        """Send an order to a worker, without waiting for an answer. A message that is lost is not repeated."""
        match order:
            case CancelJob(worker, keys):
                self.post(worker, f"cancel {', '.join(map(str, keys))}", partial(cancel_jobs, keys), by)
            case OfferMigration(worker, keys):
                self.post(worker, f"offer {keys}", lambda engine, now: engine.offer_migration(keys, now), by)
            case ReleaseLease(worker, key):
                self.post(worker, f"release {key}", lambda engine, now: engine.revoke_lease(key, now), by)

    def dispatch(self, worker: SimWorker, effects: Sequence[Effect], load: WorkerLoad | None) -> None:
        """Send a worker's events to the listeners in one message, with the load if it has changed, and carry out its
        other effects."""
        assert self._listeners, "nobody listens"
        events = tuple(effect for effect in effects if isinstance(effect, JobEvent))
        for listener in self._listeners:
            self.send("", partial(listener.on_worker_events, worker.ref, events, load), worker.party, listener.party)
        for effect in effects:
            if not isinstance(effect, JobEvent):
                self._carry(worker, effect)

    def stream(self, worker: SimWorker, steps: StepRun) -> None:
        """Pass a worker's report of steps that were computed ahead of the clock to all listeners, before the time at
        which it arrives."""
        for listener in self._listeners:
            listener.streamed(worker.ref, steps)

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
            case SendAnnouncement(consumer, message):
                label = f"announce {message.key} {message.num_computed}"
                self.post(consumer, label, lambda engine, now: engine.announced(message, now), by)
            case SendHandoffEnded(consumer, key, kind, text):
                self.post(consumer, f"end {key}", lambda engine, now: engine.handoff_ended(key, kind, text, now), by)
            case FollowHandoff(source, key, prefix_request):
                label = f"{'follow' if prefix_request is None else 'borrow'} {key}"
                self._request_renewal(
                    worker, source, (key,), label, lambda e, now: e.follow(key, worker.ref, now, prefix_request)
                )
            case RenewLeases(source, keys):
                self._request_renewal(worker, source, keys, "renew", lambda e, now: e.renew(keys, worker.ref, now))
            case SendRemainderRequest(source, key, num_known):
                self.post(source, f"take {key}", lambda engine, now: engine.request_remainder(key, num_known, now), by)
            case ReleaseHandoff(source, key, is_taken):
                label = f"{'taken' if is_taken else 'release'} {key}"
                self.post(source, label, lambda e, now: e.release(key, now, is_taken=is_taken, consumer=worker.ref), by)
            case StartRead():
                self._read(worker, effect)
            case TearDownPeer(source):
                self._tear_down(worker, source)
            case ReadFiles() | WriteFiles():
                self._files.carry_out(worker, effect)
            case _:
                pass

    def _request_renewal(
        self, consumer: SimWorker, source: WorkerRef, keys: tuple[HandoffKey, ...], label: str, command: Command
    ) -> None:
        """Send a command to the source of a pull; its answer renews the lease, counted from the time of sending."""
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

        def handle(engine: Engine, now: float) -> Sequence[Effect]:
            effects = command(engine, now)
            self.post(consumer.ref, f"{label} heard", renewed, producer.party)
            return effects

        self.post(source, label, handle, consumer.party)

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
        """Cut all reads from a peer, as the transport does when it forgets the peer: no read writes to a block of the
        worker any more."""
        self._fabric.cut(source, worker.ref)
        text = "torn down"
        self.post(worker.ref, text, lambda e, now: e.peer_lost(source, text, proven=True, now=now), worker.party)


def cancel_jobs(keys: Iterable[JobKey], engine: Engine, now: float) -> list[Effect]:
    """Cancel the jobs `keys` at a worker's engine, and return the effects to carry out."""
    return [effect for key in keys for effect in engine.cancel(key, now)]
