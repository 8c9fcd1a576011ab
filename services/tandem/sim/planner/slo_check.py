"""Check by one simulation whether a deployment meets its latency targets under a workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tandem.core.quantile_sketch import QuantileSketch
from tandem.core.slo import Slo
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.machines.deployment import Deployment
from tandem.sim.report.report import LatencyStats, SimulationReport
from tandem.sim.simulate import simulate
from tandem.workload.scheduled_request import ScheduledRequest


@dataclass(frozen=True, slots=True)
class Miss:
    """A missed target: more requests or gaps of the class `group` than allowed are later than `target_s`.

    `measure`: "TTFT" or "ITL". `value_s`: the percentile in seconds; None when the run was aborted before it was known
    or requests were not served. `target_s`: the target in seconds; None when more requests were not served than may be
    late. `share`: the share of the class's requests or gaps above the target. `errors`: the errors of the requests that
    were not served, as text.
    """

    group: str
    measure: str
    value_s: float | None
    target_s: float | None
    share: float
    errors: str = ""


@dataclass(frozen=True, slots=True)
class SloResult:
    """Result of one simulated deployment, compared with its latency targets.

    `report`: None when the run was aborted because a target could no longer be met. `margin`: the largest ratio of a
    percentile to its target, 1 when it is met exactly; None when unknown. `ttft_s`, `itl_s`: the percentile of the
    worst class, in seconds; None when unknown.
    """

    deployment: Deployment
    misses: tuple[Miss, ...]
    report: SimulationReport | None
    margin: float | None
    ttft_s: float | None
    itl_s: float | None

    @property
    def holds(self) -> bool:
        return not self.misses


class _GivenUpError(Exception):
    """Raised inside a run, with the missed targets, when they can no longer be met."""


@dataclass(frozen=True)
class SloTarget:
    """A workload and the latency targets that a deployment must meet under it.

    `percentile`: percentage of each class's requests, and of its gaps between tokens, that must meet `slo`; in (0,
    100). `seed`: seed of every simulation.
    """

    requests: Sequence[ScheduledRequest]
    slo: Slo
    percentile: float
    seed: int

    def tried(self, deployment: Deployment) -> SloResult:
        """Simulate a deployment and return its result; abort the run once a target is certainly missed.

        Every deployment gets the same seed, so that differences come from the deployments."""

        def watch(_: SimCluster, tally: LatencyStats) -> None:
            misses = self._misses(tally, self._most, is_whole=False)
            if misses:
                raise _GivenUpError(misses)

        try:
            report, tally = simulate(deployment.cluster(self.seed), self.requests, self.slo, look=watch)
        except _GivenUpError as given_up:
            (misses,) = given_up.args
            return SloResult(deployment, misses, None, None, None, None)
        groups = tally.groups.values()
        ttft = max((self._percentile(group.ttft) for group in groups if group.ttft.count), default=None)
        itl = max((self._percentile(group.itl) for group in groups if group.itl.count), default=None)
        pairs = ((ttft, self.slo.ttft_s), (itl, self.slo.itl_s))
        parts = [value / target for value, target in pairs if value is not None and target is not None]
        allowed = {
            name: (self._tolerated * group.num_requests, self._tolerated * group.itl.count)
            for name, group in tally.groups.items()
        }
        misses = self._misses(tally, allowed, is_whole=True)
        return SloResult(deployment, misses, report, max(parts, default=None), ttft, itl)

    # ---- inside

    @property
    def _tolerated(self) -> float:
        return 1 - self.percentile / 100

    @cached_property
    def _most(self) -> dict[str, tuple[float, float]]:
        """The most late requests and late gaps of each class; empty when answers lead to further requests, because the
        totals are not known in advance then."""
        if any(scheduled.follow is not None for scheduled in self.requests):
            return {}
        requests = Counter(scheduled.group for scheduled in self.requests)
        gaps: Counter[str] = Counter()
        for scheduled in self.requests:
            gaps[scheduled.group] += scheduled.request.sampling.max_tokens - 1
        return {group: (self._tolerated * requests[group], self._tolerated * gaps[group]) for group in requests}

    def _misses(
        self, tally: LatencyStats, allowed: Mapping[str, tuple[float, float]], *, is_whole: bool
    ) -> tuple[Miss, ...]:
        """Return the missed targets; `allowed` has the most late requests and late gaps of each class."""
        found: list[Miss] = []
        for name in sorted(tally.groups.keys() & allowed.keys()):
            group = tally.groups[name]
            late, late_gaps = allowed[name]
            if group.num_late > late + 1e-9:
                value = self._percentile(group.ttft) if is_whole and not group.errors and group.ttft.count else None
                target_s = self.slo.ttft_s if group.errors.total() <= late + 1e-9 else None
                share, errors = group.num_late / group.num_requests, ", ".join(sorted(group.errors))
                found.append(Miss(name, "TTFT", value, target_s, share, errors))
            if group.num_late_gaps > late_gaps + 1e-9:
                value = self._percentile(group.itl) if is_whole else None
                found.append(Miss(name, "ITL", value, self.slo.itl_s, group.num_late_gaps / group.itl.count))
        return tuple(found)

    def _percentile(self, times: QuantileSketch) -> float:
        return times.percentile(self.percentile / 100)
