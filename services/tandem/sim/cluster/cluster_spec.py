"""Define what a simulated cluster consists of, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.admission.tenant import Tenant
from tandem.core.config import GatewayConfig
from tandem.core.ids import TenantId
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets
from tandem.sim.cluster.worker import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Composition and delays of a simulated cluster.

    - `workers`: each kind of worker, with the number of workers of that kind.
    - `gateway`: settings of every gateway.
    - `latency_s`: seconds of a message between any two processes, in one direction.
    - `read_latency_s`: seconds before the first byte of a KV read.
    - `delivery_s`: seconds that a token takes from the gateway to its client; for each token one of them is picked, all
      equally likely.
    - `seed`: picks delivery times, the random factors on step times, and the gateway of each request.
    - `tenants`: the known tenants, to each of which every gateway grants its full quota; None: every tenant is
      accepted, without limits.
    - `targets`: latency targets of each lane.
    - `index_delay_s`: seconds until gateways know what a worker's prefix cache stored or evicted."""

    workers: tuple[tuple[WorkerSpec, int], ...]
    gateway: GatewayConfig
    latency_s: float = 2e-4
    read_latency_s: float = 5e-5
    delivery_s: tuple[float, ...] = (0.0,)
    seed: int = 0
    num_gateways: int = 1
    tenants: Mapping[TenantId, Tenant] | None = None
    targets: LatencyTargets = NO_TARGETS
    index_delay_s: float = 0.05
