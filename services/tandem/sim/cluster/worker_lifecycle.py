"""Start, drain and end workers, and notify gateways and other workers with the delays of the real cluster.

A gateway notices at once that a worker's stream ended, and counts the worker as lost after `NOTICE_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tandem.core.errors import ErrorKind
from tandem.core.events import Failed
from tandem.engine.effects import Effect
from tandem.engine.engine import Engine
from tandem.orchestration.known_workers import DISCOVERY_PERIOD_S
from tandem.sim.cluster.fabric import Fabric
from tandem.sim.cluster.gateway import SimGateway
from tandem.sim.cluster.network import Network
from tandem.sim.cluster.worker import SimWorker
from tandem.sim.kernel.event_queue import Actor, SimEventQueue

NOTICE_S = 0.2
"""Seconds from the end of a worker's process until a gateway counts it as lost, and until the transport of another
worker reports that it is gone."""
DRAIN_LOOK_S = 0.1


@dataclass(slots=True)
class WorkerLifecycle:
    """Start, drain and end the workers of one cluster.

    `workers` is the cluster's own list, in which a new incarnation takes the place of the one before. The argument `by`
    of the methods is the actor whose event causes the change.
    """

    agenda: SimEventQueue
    fabric: Fabric
    network: Network
    workers: list[SimWorker]
    gateways: Sequence[SimGateway]
    _registry_back_at: float = 0.0

    def lose_registry(self, lasts_s: float) -> None:
        """Make the registry unavailable for `lasts_s` seconds: gateways discover no new worker meanwhile."""
        self._registry_back_at = max(self._registry_back_at, self.agenda.now + lasts_s)

    def begin(self, worker: SimWorker, by: Actor) -> None:
        """Make a worker reachable now. Gateways find it `DISCOVERY_PERIOD_S` seconds later, or that long after the
        return of the registry if it is unavailable now."""
        self.network.add(worker)
        seen_s = max(0.0, self._registry_back_at - self.agenda.now) + DISCOVERY_PERIOD_S
        for gateway in self.gateways:
            self.agenda.after(seen_s, "", partial(_discover, gateway, worker), by=by, to=gateway.party)

    def end(self, worker: SimWorker, by: Actor, reason: str = "killed") -> None:
        worker.party.vanish()
        self.fabric.lose(worker.ref)
        for other in self.workers:
            if other is not worker:
                gone = partial(other.post, partial(_peer_gone, worker, reason))
                self.agenda.after(NOTICE_S, "", gone, by=by, to=other.party)
        for gateway in self.gateways:
            gateway.workers.missed(worker.ref)
            lost = partial(gateway.reports.lost, worker.ref, reason)
            self.agenda.after(NOTICE_S, "", lost, by=by, to=gateway.party)

    def drain(self, worker: SimWorker, until: float, by: Actor, ended: Callable[[], None]) -> None:
        """Drain a worker: it accepts no new jobs, and its jobs migrate.

        The worker ends when it has no job left or at the virtual time `until`; the jobs left then fail with
        WORKER_LOST. `ended` is called last. This method does not wait.
        """
        worker.post(Engine.start_drain)
        self._look(worker, until, by, ended)

    # ---- inside

    def _look(self, worker: SimWorker, until: float, by: Actor, ended: Callable[[], None]) -> None:
        if worker.engine.num_live and self.agenda.now < until:
            self.agenda.after(DRAIN_LOOK_S, "", partial(self._look, worker, until, by, ended), by=by)
            return
        left = [Failed(key, ErrorKind.WORKER_LOST, "the worker stopped") for key in worker.engine.live_jobs()]
        self.network.dispatch(worker, left, None)
        self.end(worker, by, "the worker stopped")
        ended()


def _discover(gateway: SimGateway, worker: SimWorker) -> None:
    if not worker.party.is_gone:
        gateway.reports.met(worker)


def _peer_gone(worker: SimWorker, reason: str, engine: Engine, now: float) -> list[Effect]:
    lost = engine.source_lost(worker.ref, reason, now)
    return [*lost, *engine.peer_lost(worker.ref, reason, proven=True, now=now)]
