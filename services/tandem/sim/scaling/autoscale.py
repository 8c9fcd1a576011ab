"""Run one workload on a simulated cluster whose number of workers an autoscaler sets, and format the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from tandem.core.slo import Slo
from tandem.scaling.cluster_state import ClusterState
from tandem.scaling.decision import Decision, ReplicaTarget
from tandem.scaling.scaler import Scaler
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.report import table
from tandem.sim.report.latency_stats import LatencyStats
from tandem.sim.report.report import SimulationReport, report
from tandem.sim.scaling.autoscaled_cluster import ROLES, AutoscaledCluster, Autoscaler, ElasticSpec, Meter, Moment
from tandem.workload.scheduled_request import ScheduledRequest


@dataclass(eq=False, slots=True)
class ScalerAdapter:
    """Adapt a `Scaler` to the `Autoscaler` protocol and record its decisions."""

    scaler: Scaler
    decisions: list[Decision] = field(default_factory=list)

    def target(self, observed: ClusterState, ongoing: ReplicaTarget) -> ReplicaTarget:
        decision = self.scaler.decide(observed)
        self.decisions.append(decision)
        return decision.target


@dataclass(frozen=True, slots=True)
class ElasticRun:
    """Result of a simulated run with an autoscaler.

    `gpu_hours`: accelerator hours of all workers, each from the decision to start it to its end or the end of the run.
    `moments`: the sizes and targets at each decision of the autoscaler.
    """

    report: SimulationReport
    tally: LatencyStats
    gpu_hours: float
    moments: tuple[Moment, ...]


def simulate_elastic(
    spec: ClusterSpec,
    elastic: ElasticSpec,
    autoscaler: Autoscaler,
    requests: Iterable[ScheduledRequest],
    slo: Slo,
    on_ended: Callable[[ClientTrace], None] | None = None,
) -> ElasticRun:
    """Run a workload to its end on a new cluster whose size `autoscaler` sets, and return the result.

    `spec`: the cluster at the start. `elastic`: the workers to start, and the delays. `on_ended`: called with the trace
    of each request at its end. Raises ValueError when there is no request, and AssertionError when requests, reads or
    KV blocks are left over.
    """
    cluster, tally, meter = SimCluster(spec), LatencyStats(slo), Meter(slo)
    operator = AutoscaledCluster(cluster, elastic, autoscaler, meter)

    def ended(trace: ClientTrace) -> None:
        tally.add(trace)
        meter.ended(trace)
        if on_ended is not None:
            on_ended(trace)

    cluster.run(requests, ended, sent=meter.sent, computed=meter.computed)
    cluster.check()
    return ElasticRun(report(cluster, tally), tally, operator.gpu_hours(tally.ended_s), tuple(operator.moments))


def format_run(run: ElasticRun, slo: Slo) -> str:
    """Return the result of a run as several paragraphs of text: latencies by class, workers, totals."""
    return "\n\n".join((table.latencies(run.report.groups), _workers(run), _totals(run, slo)))


def _workers(run: ElasticRun) -> str:
    rows: list[tuple[str, ...]] = [("workers", "least", "mean", "most", "changes")]
    for index, role in enumerate(ROLES):
        sizes = [moment.serving[index] for moment in run.moments]
        targets = [moment.target[index] for moment in run.moments]
        changes = sum(one != other for one, other in pairwise(targets))
        mean = sum(sizes) / max(1, len(sizes))
        rows.append((f"  {role}", f"{min(sizes, default=0)}", f"{mean:.1f}", f"{max(sizes, default=0)}", f"{changes}"))
    return table.grid(rows)


def _totals(run: ElasticRun, slo: Slo) -> str:
    report = run.report
    refused = ", ".join(f"{number:,} {kind}" for kind, number in report.errors.items()) or "none"
    return table.facts([
        ("requests", f"{report.num_requests:,} in {report.wall_s:,.1f} s virtual; not served: {refused}"),
        ("goodput", f"{report.good_rate:,.1f} requests/s = {report.good_share:.1%} inside {slo}"),
        ("GPU hours", f"{run.gpu_hours:,.2f}, of which starting and draining are a part"),
        ("digest", f"{report.digest} of {report.num_events:,} events"),
    ])  # fmt: skip
