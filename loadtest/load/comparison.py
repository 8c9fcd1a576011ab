"""Compare two load tests row by row, with intervals of random variation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from loadtest.common.bootstrap import Interval, ratio_intervals, share_ratio_interval
from loadtest.common.distribution import Distribution
from loadtest.load.load_report import LoadReport, Sampled, Scope

LEAST_FOR_P99 = 100
"""With fewer requests the p99 is close to the maximum, so it is not compared."""
SEED = 0

_VALUES: dict[str, Callable[[Sampled], Sequence[float]]] = {
    "ttft": lambda one: (one.ttft_s,),
    "itl": lambda one: one.gaps_s,
    "tpot": lambda one: () if one.tpot_s is None else (one.tpot_s,),
    "e2e": lambda one: (one.e2e_s,),
}
_PERCENTILES: dict[str, tuple[float, Callable[[Distribution], float]]] = {
    "p50": (0.5, lambda found: found.p50),
    "p99": (0.99, lambda found: found.p99),
}


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity of `scope` in both tests.

    `ratio` is second / first; `interval` is the range of the ratio by chance alone, None where unknown; `is_time` marks
    seconds, where less is better.
    """

    scope: str
    name: str
    first: float
    second: float
    interval: Interval | None
    is_time: bool = True
    has_enough: bool = True

    @property
    def ratio(self) -> float | None:
        return self.second / self.first if self.first else None

    @property
    def verdict(self) -> str:
        if self.interval is None:
            return "-"
        if not self.has_enough:
            return f"fewer than {LEAST_FOR_P99} requests"
        if self.interval.low <= 1 <= self.interval.high:
            return "inside the noise"
        return "B is lower" if self.interval.high < 1 else "B is higher"


def compare(first: LoadReport, second: LoadReport) -> list[ComparisonRow]:
    """Return rows for all requests, then for each class that both tests have."""
    rows: list[ComparisonRow] = []
    for a, b in pairs(first, second):
        sides = [_members(report.sample, a) for report in (first, second)]
        for metric, values in _VALUES.items():
            rows += _latency_rows(a, b, metric, [[values(one) for one in side] for side in sides])
        rows += _rate_rows(a, b)
    return rows


def pairs(first: LoadReport, second: LoadReport) -> list[tuple[Scope, Scope]]:
    theirs = {(scope.kind, scope.name): scope for scope in second.scopes}
    ours = [scope for scope in first.scopes if scope.kind != "tenant" and (scope.kind, scope.name) in theirs]
    found = [(scope, theirs[scope.kind, scope.name]) for scope in ours]
    return found if len(found) != 2 else found[:1]  # a single class repeats the rows of all requests


def differing_facts(first: LoadReport, second: LoadReport) -> list[str]:
    """Return the facts in which two tests differ although they should be equal for a comparison."""
    names = ("workload", "seed", "count", "rate", "speedup")
    pairs = [(name, first.facts.get(name, "-"), second.facts.get(name, "-")) for name in names]
    return [f"{name} {a} and {b}" for name, a, b in pairs if a != b]


def _members(sample: Iterable[Sampled], scope: Scope) -> list[Sampled]:
    return [one for one in sample if scope.kind == "all" or one.group == scope.name]


def _latency_rows(a: Scope, b: Scope, metric: str, sides: Sequence[Sequence[Sequence[float]]]) -> list[ComparisonRow]:
    ours, theirs = a.times.get(metric), b.times.get(metric)
    if ours is None or theirs is None:
        return []
    intervals = ratio_intervals(sides[1], sides[0], [share for share, _ in _PERCENTILES.values()], SEED)
    num_least = min(sum(1 for values in side if values) for side in sides)
    return [
        ComparisonRow(
            scope=a.name,
            name=f"{metric.upper()} {name}",
            first=value(ours),
            second=value(theirs),
            interval=interval,
            has_enough=name != "p99" or num_least >= LEAST_FOR_P99,
        )
        for (name, (_, value)), interval in zip(_PERCENTILES.items(), intervals, strict=True)
    ]


def _rate_rows(a: Scope, b: Scope) -> list[ComparisonRow]:
    def row(name: str, first: float, second: float, interval: Interval | None = None) -> ComparisonRow:
        return ComparisonRow(scope=a.name, name=name, first=first, second=second, interval=interval, is_time=False)

    counts = [(scope.num_good, scope.num_requests) for scope in (b, a)]
    good = share_ratio_interval(counts[0], counts[1], SEED)
    return [
        row("good share", a.num_good / a.num_requests, b.num_good / b.num_requests, good),
        row("good req/s", a.good_rate, b.good_rate),
        row("out tok/s", a.output_rate, b.output_rate),
    ]
