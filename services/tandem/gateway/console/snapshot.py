"""Read the current state of a gateway and its workers for the console."""

from __future__ import annotations

from importlib.metadata import version

from tandem.core.clock import Clock, wall_ns
from tandem.core.ids import GatewayId
from tandem.gateway.console.view import GatewaySnapshot
from tandem.gateway.orchestration.driver import RequestDriver
from tandem.gateway.workers.worker_pool import WorkerPool

MAX_FLOWS = 256


class SnapshotSource:
    """Source of snapshots of one gateway; construct it when the gateway starts, as its age counts from then. `life`:
    the gateway's name, unique to one run of the process."""

    __slots__ = ("_began_at", "_clock", "_dispatcher", "_fleet", "_life", "_version")

    def __init__(self, life: GatewayId, dispatcher: RequestDriver, fleet: WorkerPool, clock: Clock) -> None:
        self._life = life
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._clock = clock
        self._began_at = clock.now()
        self._version = version("tandem")

    def snapshot(self) -> GatewaySnapshot:
        dispatcher = self._dispatcher
        return GatewaySnapshot(
            life=self._life,
            version=self._version,
            wall_s=wall_ns() / 1e9,
            now=self._clock.now(),
            began_at=self._began_at,
            missing=dispatcher.ready(),
            models=dispatcher.models(),
            known=self._fleet.workers(),
            live=self._fleet.views(),
            breakers=dispatcher.breakers(),
            flows=tuple(dispatcher.flows.latest(MAX_FLOWS)),
            num_open=dispatcher.num_open(),
        )
