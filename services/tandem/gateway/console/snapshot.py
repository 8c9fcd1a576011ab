"""Read the current state of a gateway and its workers for the console."""

from __future__ import annotations

from importlib.metadata import version

from tandem.core.clock import Clock, wall_ns
from tandem.core.ids import GatewayId
from tandem.gateway.console.view import GatewaySnapshot
from tandem.gateway.orchestration.driver import RequestDriver
from tandem.gateway.workers.worker_pool import WorkerPool

MAX_FLOWS = 256
_VERSION = version("tandem")


def take_snapshot(
    life: GatewayId, dispatcher: RequestDriver, fleet: WorkerPool, clock: Clock, began_at: float
) -> GatewaySnapshot:
    """Return the present state of a gateway and its workers.

    `life`: the gateway's name, unique to one run of the process. `began_at`: when the gateway started, in seconds on
    `clock`.
    """
    return GatewaySnapshot(
        life=life,
        version=_VERSION,
        wall_s=wall_ns() / 1e9,
        now=clock.now(),
        began_at=began_at,
        missing=dispatcher.ready(),
        models=dispatcher.models(),
        known=fleet.workers(),
        live=fleet.views(),
        breakers=dispatcher.breakers(),
        flows=tuple(dispatcher.flows.latest(MAX_FLOWS)),
        num_open=dispatcher.num_open(),
    )
