"""Run one workload on a simulated cluster whose number of workers an autoscaler sets, and describe the result.

Workers start after a delay, and stop by drain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from tandem.core.config import Pool
from tandem.core.errors import TandemError
from tandem.core.request import Request
from tandem.core.slo import Slo
from tandem.orchestration.known_workers import DISCOVERY_PERIOD_S
from tandem.scaling.cluster_state import ClusterState, Demand, Role
from tandem.scaling.decision import Decision, ReplicaTarget
from tandem.scaling.demand_totals import DemandTotals, demand_between
from tandem.scaling.scaler import Scaler, pause_s
from tandem.scaling.worker_state import WorkerState, build_observation, capacity_of
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.worker import SimWorker, WorkerSpec
from tandem.sim.report import table
from tandem.sim.report.report import LatencyStats, SimulationReport, report
from tandem.workload.scheduled_request import MODEL, ScheduledRequest

ROLES: tuple[Role, Role] = ("prefill", "decode")


class Meter:
    """Count the requests and tokens of all gateways together, by the rules of the real gateways, and return them as
    `Demand` for an autoscaler."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._totals = DemandTotals()
        self._taken = DemandTotals()
        self._taken_at = 0.0

    def sent(self, scheduled: ScheduledRequest) -> None:
        self._totals.add_arrival(len(scheduled.request.prompt_tokens))

    def computed(self, request: Request, num_cached: int) -> None:
        self._totals.add_prompt(len(request.prompt_tokens), num_cached)

    def ended(self, trace: ClientTrace) -> None:
        gaps, outcome = trace.gaps_s, trace.outcome
        self._totals.add_end(
            outcome.kind.value if isinstance(outcome, TandemError) else "finished",
            is_late=bool(trace.token_times) and self._slo.violates_ttft(trace.ttft_s),
            num_output=len(trace.token_times),
            num_gaps=len(gaps),
            num_late_gaps=self._slo.num_late(gaps),
        )

    def take(self, now: float) -> Demand:
        """Return the demand from the last call, or from time 0, until `now`, the present virtual time in seconds."""
        demand = demand_between([(self._totals, self._taken)], now - self._taken_at)
        self._taken, self._taken_at = replace(self._totals), now
        return demand


class Autoscaler(Protocol):
    """Interface of a policy that returns the target number of workers of each role.

    `observed`: the cluster's demand, workers and queues. `ongoing`: the number of requests at the workers of each role;
    the number for prefill includes the requests that wait at the gateways.
    """

    def target(self, observed: ClusterState, ongoing: ReplicaTarget) -> ReplicaTarget: ...


@dataclass(eq=False, slots=True)
class ScalerAdapter:
    """Adapt a `Scaler` to the `Autoscaler` protocol and record its decisions."""

    scaler: Scaler
    decisions: list[Decision] = field(default_factory=list)

    def target(self, observed: ClusterState, ongoing: ReplicaTarget) -> ReplicaTarget:
        decision = self.scaler.decide(observed)
        self.decisions.append(decision)
        return decision.target


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSpec:
    """Workers and delays of an autoscaled cluster.

    - `kinds`, `degrees`: the spec and the number of accelerators of a worker of each role.
    - `interval_s`: seconds between two decisions of the autoscaler; while no worker serves or starts, fewer
      (`tandem.scaling.scaler.pause_s`).
    - `start_s`: seconds from the decision to start a worker until gateways have found it.
    - `drain_s`: the most seconds that a worker may drain before it ends.
    """

    kinds: Mapping[Role, WorkerSpec]
    degrees: Mapping[Role, int]
    interval_s: float
    start_s: float
    drain_s: float = 60.0


@dataclass(eq=False, slots=True)
class _BilledWorker:
    """Describe one worker and the span that is paid for: from its order at `began_s` to `ended_s` (infinity while it
    runs).

    `worker`: None while it starts."""

    role: Role
    began_s: float
    worker: SimWorker | None = None
    drains: bool = False
    ended_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Moment:
    """The number of serving workers at the time `at_s`, and the target that the autoscaler set then."""

    at_s: float
    serving: ReplicaTarget
    target: ReplicaTarget


@dataclass(eq=False)
class AutoscaledCluster:
    """Start and drain workers of a simulated cluster so that their numbers meet the target of an autoscaler.

    Every `interval_s` virtual seconds, or sooner while there is no worker, the cluster is observed and the autoscaler
    sets the target. `meter`: counts the demand between two observations. `moments`: what was observed and decided, in
    order of time.
    """

    cluster: SimCluster
    spec: ElasticSpec
    autoscaler: Autoscaler
    meter: Meter
    moments: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._billed = [_BilledWorker(role, 0.0, worker) for role in ROLES for worker in self._workers(role)]
        self.cluster.repeat(self._look)

    def gpu_hours(self, until_s: float) -> float:
        """Return the accelerator hours of all prefill and decode workers up to `until_s`.

        A worker counts from the decision to start it until its end.
        """
        return sum(
            self.spec.degrees[billed.role] * max(0.0, min(billed.ended_s, until_s) - billed.began_s)
            for billed in self._billed
        ) / 3600  # fmt: skip

    def paid_shares(self, since_s: float, until_s: float) -> dict[SimWorker, float]:
        """Return, for each prefill and decode worker that has started, the share of the time from `since_s` to
        `until_s` that lies between the decision to start it and its end."""
        return {
            billed.worker: max(0.0, min(billed.ended_s, until_s) - max(billed.began_s, since_s)) / (until_s - since_s)
            for billed in self._billed
            if billed.worker is not None and until_s > since_s
        }

    # ---- one look

    def _look(self) -> float:
        """Decide once, and return the seconds until the next decision."""
        if self.cluster.now == 0:
            return self.spec.interval_s
        observed, ongoing = self._observed(), self._ongoing()
        target = self.autoscaler.target(observed, ongoing)
        serving = ReplicaTarget(observed.prefill.num_serving, observed.decode.num_serving)
        self.moments.append(Moment(self.cluster.now, serving, target))
        for role, number in zip(ROLES, target, strict=True):
            self._carry_out(role, number)
        return pause_s(observed, self.spec.interval_s)

    def _observed(self) -> ClusterState:
        now = self.cluster.now
        starting: Counter[str] = Counter(s.role for s in self._billed if s.worker is None and s.ended_s == math.inf)
        workers = [_worker_state(worker) for worker in self.cluster.workers]
        return build_observation(now, self.meter.take(now), self.cluster.backlog(), workers, starting)

    def _ongoing(self) -> ReplicaTarget:
        numbers = [
            sum(load.num_running + load.num_waiting for load in (w.engine.load() for w in self._workers(role)))
            for role in ROLES
        ]
        return ReplicaTarget(numbers[0] + self.cluster.num_queued, numbers[1])

    def _workers(self, pool: Pool) -> list[SimWorker]:
        return [worker for worker in self.cluster.workers if worker.spec.pool == pool]

    # ---- actions

    def _carry_out(self, role: Role, number: int) -> None:
        kept = [s for s in self._billed if s.role == role and s.ended_s == math.inf and not s.drains]
        for _ in range(number - len(kept)):
            self._order(role)
        # Workers that have not started yet are stopped first; among equals, the newest first.
        stopping = sorted(kept, key=lambda billed: (billed.worker is None, billed.began_s), reverse=True)
        for billed in stopping[: max(0, len(kept) - number)]:
            self._stop(billed)

    def _order(self, role: Role) -> None:
        billed = _BilledWorker(role, self.cluster.now)
        self._billed.append(billed)

        def begin() -> None:
            if billed.ended_s == math.inf:
                billed.worker = self.cluster.start(self.spec.kinds[role])

        self.cluster.after(max(0.0, self.spec.start_s - DISCOVERY_PERIOD_S), begin)

    def _stop(self, billed: _BilledWorker) -> None:
        def ended() -> None:
            billed.ended_s = self.cluster.now

        if billed.worker is None:
            ended()
            return
        billed.drains = True
        self.cluster.drain(billed.worker, self.spec.drain_s, ended)


def _worker_state(worker: SimWorker) -> WorkerState:
    spec, load = worker.spec, worker.engine.load()
    capacity = capacity_of(worker.step_cost, load, spec.layout.block_size, spec.config.engine, spec.config.worker)
    return WorkerState(ref=worker.ref, model=MODEL, pool=spec.pool, role=spec.pool, load=load, capability=capacity)


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

    def describe(self, slo: Slo) -> str:
        """Return the result as several paragraphs of text: latencies by class, workers, totals."""
        return "\n\n".join((table.latencies(self.report.groups), _workers(self), _totals(self, slo)))


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
    whole = report(cluster, tally, operator.paid_shares(tally.began_s, tally.ended_s))
    return ElasticRun(whole, tally, operator.gpu_hours(tally.ended_s), tuple(operator.moments))


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
