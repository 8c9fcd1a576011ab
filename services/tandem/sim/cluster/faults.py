"""Inject scheduled faults into workers, connections and links of a simulated cluster, and notify gateways and other
workers of them.

Each gateway or worker is notified with the delay with which a real one would notice the fault. A gateway counts a
silent worker as lost after `gateway.worker_timeout_s`. When such a worker returns, it cancels the jobs that its gateway
no longer waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Literal

from tandem.core.config import GatewayConfig
from tandem.core.ids import JobKey, RequestId
from tandem.engine.effects import Effect
from tandem.engine.engine import Engine
from tandem.sim.cluster.gateway import SimGateway
from tandem.sim.cluster.network import cancel_jobs
from tandem.sim.cluster.worker import SimWorker
from tandem.sim.cluster.worker_lifecycle import WorkerLifecycle
from tandem.sim.kernel.event_queue import Actor

FaultKind = Literal["kill", "drain", "stall", "cut gateways", "cut gateway", "cut peer", "slow", "lose registry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of the worker with index `worker` in the cluster, from `at_s` for `lasts_s` virtual seconds.

    `kind`: "kill" ends the worker at once, "drain" drains it, "stall" halts it, and "cut gateways" and "cut gateway"
    hold its messages to and from all gateways or one of them. "cut peer" stops messages and KV reads between it and
    another worker, "slow" divides the bandwidth of its link by 100, and "lose registry" makes the registry unavailable.
    `other`: index of that gateway or other worker.

    When the fault is over, a new incarnation of the worker begins (after "kill" and "drain"), the worker resumes (after
    "stall"), or the connection, link or registry works again.
    """

    at_s: float
    kind: FaultKind
    worker: int
    other: int = 0
    lasts_s: float


class Faults:
    """Schedule and inject the faults of one run.

    `owner`: function that returns the gateway of a request. `revive`: function that returns a new incarnation of a
    worker that has ended."""

    def __init__(
        self,
        lives: WorkerLifecycle,
        config: GatewayConfig,
        owner: Callable[[RequestId], SimGateway],
        revive: Callable[[SimWorker], SimWorker],
    ) -> None:
        self._agenda = lives.agenda
        self._fabric = lives.fabric
        self._network = lives.network
        self._lives = lives
        self._gateways = lives.gateways
        self._silence_s = config.worker_timeout_s
        self._owner = owner
        self._revive = revive
        self._lost: set[tuple[Actor, Actor]] = set()

    def schedule(self, faults: Sequence[Fault], by: Actor) -> None:
        for fault in faults:
            self._agenda.at(fault.at_s, f"{fault.kind} {fault.worker}", partial(self._strike, fault, by), by=by)

    def _strike(self, fault: Fault, by: Actor) -> None:
        worker = self._lives.workers[fault.worker]
        later = partial(self._agenda.after, fault.lasts_s, "", by=by)
        match fault.kind:
            case "kill":
                self._lives.end(worker, by)
                later(partial(self._restart, fault.worker, by))
            case "drain":
                until, again = self._agenda.now + fault.lasts_s, partial(self._restart, fault.worker, by)
                self._lives.drain(worker, until, by, again)
            case "stall":
                self._agenda.halt(worker.party)
                self._watch_silence(worker, self._gateways, by, lambda: worker.party.held is not None)
                later(partial(self._go_on, worker))
            case "cut gateways" | "cut gateway":
                cut = self._gateways if fault.kind == "cut gateways" else [self._gateways[fault.other]]
                self._cut_gateways(worker, cut, by)
                later(partial(self._mend_gateways, worker, cut))
            case "cut peer":
                self._cut_peer(worker, self._lives.workers[fault.other], later)
            case "slow":
                self._fabric.set_bandwidth(worker.ref, worker.spec.bandwidth / 100)
                later(partial(self._fabric.set_bandwidth, worker.ref, worker.spec.bandwidth))
            case "lose registry":
                self._lives.lose_registry(fault.lasts_s)

    def _restart(self, index: int, by: Actor) -> None:
        self._lives.workers[index] = worker = self._revive(self._lives.workers[index])
        self._lives.begin(worker, by)

    # ---- silence

    def _go_on(self, worker: SimWorker) -> None:
        self._agenda.go_on(worker.party)
        for gateway in self._gateways:
            self._return(worker, gateway)

    def _cut_gateways(self, worker: SimWorker, gateways: Sequence[SimGateway], by: Actor) -> None:
        for gateway in gateways:
            self._network.cut(worker.party, gateway.party)
        is_cut = partial(self._network.is_cut, worker.party, gateways[0].party)
        self._watch_silence(worker, gateways, by, is_cut)
        for gateway in gateways:
            forget = partial(self._forget, worker, gateway, is_cut)
            self._agenda.after(worker.spec.config.worker.gateway_grace_s, "", forget, by=by, to=worker.party)

    def _mend_gateways(self, worker: SimWorker, gateways: Sequence[SimGateway]) -> None:
        for gateway in gateways:
            if (worker.party, gateway.party) in self._lost:
                self._network.drop(worker.party, gateway.party)
            self._network.mend(worker.party, gateway.party)
            self._return(worker, gateway)

    def _watch_silence(
        self, worker: SimWorker, gateways: Sequence[SimGateway], by: Actor, is_silent: Callable[[], bool]
    ) -> None:
        def look(gateway: SimGateway) -> None:
            if is_silent():
                self._lost.add((worker.party, gateway.party))
                gateway.reports.lost(worker.ref, "silent")

        for gateway in gateways:
            self._agenda.after(self._silence_s, "", partial(look, gateway), by=by, to=gateway.party)

    def _return(self, worker: SimWorker, gateway: SimGateway) -> None:
        """Reconnect a worker to a gateway that had counted it as lost; do nothing when the gateway had not."""
        if (worker.party, gateway.party) not in self._lost or worker.party.is_gone:
            return
        self._lost.discard((worker.party, gateway.party))
        awaited = {key for key, _ in gateway.director.positions(worker.ref)}
        gateway.reports.met(worker)
        cancel = partial(self._cancel, gateway, awaited)
        self._network.post(worker.ref, "", cancel, gateway.party)

    def _forget(self, worker: SimWorker, gateway: SimGateway, is_cut: Callable[[], bool]) -> None:
        """Cancel all jobs of a gateway that has been out of reach for longer than the worker's grace time."""
        if is_cut():
            worker.post(partial(self._cancel, gateway, frozenset[JobKey]()))

    def _cancel(self, gateway: SimGateway, but: Set[JobKey], engine: Engine, now: float) -> list[Effect]:
        """End the jobs of a gateway that it does not wait for."""
        keys = [key for key in engine.live_jobs() if self._owner(key.request) is gateway and key not in but]
        return cancel_jobs(keys, engine, now)

    # ---- between workers

    def _cut_peer(self, first: SimWorker, other: SimWorker, later: Callable[[Callable[[], None]], object]) -> None:
        """Cut messages and reads between two workers in both directions, without a notice to either."""
        self._network.cut(first.party, other.party)
        self._fabric.stop(first.ref, other.ref)
        self._fabric.stop(other.ref, first.ref)

        def mend() -> None:
            self._network.mend(first.party, other.party)
            self._fabric.resume(first.ref, other.ref)
            self._fabric.resume(other.ref, first.ref)

        later(mend)
