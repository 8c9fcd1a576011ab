"""How workers come and go: they are found, drain, end, and the others notice; never decides who does.

A gateway misses a worker whose stream ended at once and counts it as lost after `RECONNECT_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tandem.core.errors import ErrorKind
from tandem.core.events import Failed
from tandem.engine.effects import Effect, SendEvent
from tandem.engine.engine import Engine
from tandem.sim.cluster.fabric import Fabric
from tandem.sim.cluster.gateway import SimGateway
from tandem.sim.cluster.network import Network
from tandem.sim.cluster.worker import SimWorker
from tandem.sim.kernel.event_queue import Actor, SimEventQueue

RECONNECT_S = 2.0
"""As the real gateway's."""
DISCOVERY_S = 1.0
"""As the real fleet's: between two looks at the registry."""
PEER_NOTICE_S = 0.2
"""Until the transport of another worker says that one is gone."""
DRAIN_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimClusterState:
    """Where it all happens. `workers` is the cluster's own list: a new life takes the place of the one before."""

    agenda: SimEventQueue
    fabric: Fabric
    network: Network
    workers: list[SimWorker]
    gateways: Sequence[SimGateway]


class WorkerLifecycle:
    """Begins and ends them on a stage, asked by any party."""

    def __init__(self, stage: SimClusterState) -> None:
        self._agenda = stage.agenda
        self._fabric = stage.fabric
        self._network = stage.network
        self._workers = stage.workers
        self._gateways = stage.gateways
        self._registry_back_at = 0.0

    def lose_registry(self, lasts_s: float) -> None:
        """Nobody is found meanwhile."""
        self._registry_back_at = max(self._registry_back_at, self._agenda.now + lasts_s)

    def begin(self, worker: SimWorker, by: Actor) -> None:
        """It can be reached, and gateways find it some time later."""
        self._network.add(worker)
        seen_s = max(0.0, self._registry_back_at - self._agenda.now) + DISCOVERY_S
        for gateway in self._gateways:
            self._agenda.after(seen_s, "", partial(_discover, gateway, worker), by=by, to=gateway.party)

    def end(self, worker: SimWorker, by: Actor, reason: str = "killed") -> None:
        worker.party.vanish()
        self._fabric.lose(worker.ref)
        for other in self._workers:
            if other is not worker:
                gone = partial(other.post, partial(_peer_gone, worker, reason))
                self._agenda.after(PEER_NOTICE_S, "", gone, by=by, to=other.party)
        for gateway in self._gateways:
            gateway.missed(worker.ref)
            lost = partial(gateway.lost, worker.ref, reason)
            self._agenda.after(RECONNECT_S, "", lost, by=by, to=gateway.party)

    def drain(self, worker: SimWorker, until: float, by: Actor, ended: Callable[[], None]) -> None:
        """It takes nothing new, and what runs there goes on elsewhere. It ends when nothing is left of what it had, or
        at `until`, and then says what it leaves behind."""
        worker.post(_close_doors)
        self._look(worker, until, by, ended)

    # ---- inside

    def _look(self, worker: SimWorker, until: float, by: Actor, ended: Callable[[], None]) -> None:
        if worker.engine.num_live and self._agenda.now < until:
            self._agenda.after(DRAIN_LOOK_S, "", partial(self._look, worker, until, by, ended), by=by)
            return
        left = [
            SendEvent(Failed(key, ErrorKind.WORKER_LOST, "the worker stopped")) for key in worker.engine.live_jobs()
        ]
        self._network.dispatch(worker, left, None)
        self.end(worker, by, "the worker stopped")
        ended()


def _discover(gateway: SimGateway, worker: SimWorker) -> None:
    if not worker.party.is_gone:
        gateway.met(worker)


def _close_doors(engine: Engine, now: float) -> list[Effect]:
    return engine.start_drain(now)


def _peer_gone(worker: SimWorker, reason: str, engine: Engine, now: float) -> list[Effect]:
    lost = engine.source_lost(worker.ref, reason, now)
    return [*lost, *engine.peer_lost(worker.ref, reason, proven=True, now=now)]
