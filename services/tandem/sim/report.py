"""What a simulated run amounts to: latencies, rates, how busy each pool was; never runs one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.core.events import Finished
from tandem.routing.view import Pool
from tandem.sim.cluster import SimCluster
from tandem.sim.trace import Trace
from tandem.sim.worker import SimWorker

ALL = "all"


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds; `count` values. Percentiles lie linearly between the two nearest ranks."""

    count: int
    p50: float
    p95: float
    p99: float
    p999: float
    max: float


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Of the requests of one class that ended well, from when they were due; None where there is nothing to time.
    `itl` pools the gaps between the tokens of all requests."""

    name: str
    num_requests: int
    num_complete: int
    ttft: Spread | None
    itl: Spread | None


@dataclass(frozen=True, slots=True)
class PoolReport:
    """`utilisation`: the share of the run during which a worker of the pool computed. Rates are tokens per second of
    all its workers, as their steps counted them."""

    pool: Pool
    num_workers: int
    utilisation: float
    prefill_rate: float
    decode_rate: float


@dataclass(frozen=True, slots=True)
class Report:
    """`wall_s` lasts from the first request's due time to the last end. `output_rate` counts tokens that clients got;
    `errors` how many requests ended with each kind. `kv_rate`: bytes of KV per second between workers. The first of
    `groups` is all requests. `cost_per_million` output tokens, in the currency of the prices; None unless set."""

    wall_s: float
    request_rate: float
    output_rate: float
    kv_rate: float
    errors: dict[str, int]
    groups: tuple[GroupReport, ...]
    pools: tuple[PoolReport, ...]
    cost_per_million: float | None


def report(cluster: SimCluster, traces: Sequence[Trace]) -> Report:
    """Add a run up. Raises ValueError without requests, or when one has no end."""
    if not traces or any(trace.outcome is None for trace in traces):
        raise ValueError("a report needs requests that have all ended")
    wall_s = max(trace.ended_at for trace in traces) - min(trace.due_s for trace in traces)
    names = sorted({trace.group for trace in traces})
    num_tokens = sum(len(trace.token_times) for trace in traces)
    cost = sum(worker.spec.price_per_hour for worker in cluster.workers) * wall_s / 3600
    return Report(
        wall_s=wall_s,
        request_rate=sum(trace.is_complete for trace in traces) / wall_s,
        output_rate=num_tokens / wall_s,
        kv_rate=cluster.num_read_bytes / wall_s,
        errors=dict(sorted(Counter(_kinds(traces)).items())),
        groups=(_group(ALL, traces), *(_group(n, [t for t in traces if t.group == n]) for n in names)),
        pools=_pools(cluster.workers, wall_s),
        cost_per_million=cost / num_tokens * 1e6 if cost and num_tokens else None,
    )


def spread(values: Iterable[float]) -> Spread | None:
    """None of no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Spread(len(ordered), *(_percentile(ordered, share) for share in (0.5, 0.95, 0.99, 0.999, 1.0)))


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _group(name: str, traces: Sequence[Trace]) -> GroupReport:
    whole = [trace for trace in traces if trace.is_complete]
    ttft, itl = spread(t.ttft_s for t in whole), spread(gap for t in whole for gap in t.gaps_s)
    return GroupReport(name, len(traces), len(whole), ttft, itl)


def _pools(workers: Sequence[SimWorker], wall_s: float) -> tuple[PoolReport, ...]:
    names = sorted({worker.spec.pool for worker in workers})
    return tuple(_pool(name, [w for w in workers if w.spec.pool == name], wall_s) for name in names)


def _pool(name: Pool, workers: Sequence[SimWorker], wall_s: float) -> PoolReport:
    return PoolReport(
        pool=name,
        num_workers=len(workers),
        utilisation=sum(w.busy_s for w in workers) / (len(workers) * wall_s),
        prefill_rate=sum(w.num_prefill_tokens for w in workers) / wall_s,
        decode_rate=sum(w.num_decode_tokens for w in workers) / wall_s,
    )


def _kinds(traces: Iterable[Trace]) -> Iterable[str]:
    for trace in traces:
        if trace.outcome is not None and not isinstance(trace.outcome, Finished):
            yield trace.outcome.kind.value
