"""One simulated run in which an autoscaler says how many workers there are, from cluster to result; never decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tandem.core.slo import Slo
from tandem.scaling.cluster_state import ClusterState
from tandem.scaling.decision import Decision, ReplicaTarget
from tandem.scaling.scaler import Scaler
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import ClusterSpec, SimCluster
from tandem.sim.cluster.demand_counter import Meter
from tandem.sim.report.latency_stats import LatencyStats
from tandem.sim.report.report import SimulationReport, report
from tandem.sim.scaling.autoscaled_cluster import AutoscaledCluster, Autoscaler, ElasticSpec, Moment
from tandem.workload.ask import ScheduledRequest


@dataclass(eq=False, slots=True)
class Planned:
    """An `Autoscaler`: what a scaler decides, and all that it has said."""

    scaler: Scaler
    decisions: list[Decision] = field(default_factory=list)

    def target(self, observed: ClusterState, ongoing: ReplicaTarget) -> ReplicaTarget:
        decision = self.scaler.decide(observed)
        self.decisions.append(decision)
        return decision.target


@dataclass(frozen=True, slots=True)
class ElasticRun:
    """`gpu_hours` from the beginning to the last end, of all workers from their orders to their ends."""

    report: SimulationReport
    tally: LatencyStats
    gpu_hours: float
    moments: tuple[Moment, ...]

    @property
    def good_share(self) -> float:
        return self.report.good_share


def simulate_elastic(
    spec: ClusterSpec,
    elastic: ElasticSpec,
    autoscaler: Autoscaler,
    asks: Iterable[ScheduledRequest],
    slo: Slo,
    look: Callable[[SimCluster, LatencyStats], None] | None = None,
    told: Callable[[ClientTrace], None] | None = None,
) -> ElasticRun:
    """Run a workload to its end and check that nothing is left open. `told` hears of each request that has ended.
    Raises ValueError when there is no request."""
    cluster, tally, meter = SimCluster(spec), LatencyStats(slo), Meter(slo)
    operator = AutoscaledCluster(cluster, elastic, autoscaler, meter)

    def ended(trace: ClientTrace) -> None:
        tally.add(trace)
        meter.ended(trace)
        if told is not None:
            told(trace)
        if look is not None:
            look(cluster, tally)

    cluster.run(asks, ended, sent=meter.sent)
    cluster.check()
    return ElasticRun(report(cluster, tally), tally, operator.gpu_hours(tally.ended_s), tuple(operator.moments))
