"""What a simulated run amounts to: latencies, rates, how busy each pool was, what it costs; never runs one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.quantile_sketch import LatencySummary
from tandem.routing.worker_view import Pool
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.worker import SimWorker
from tandem.sim.report.latency_stats import GroupTally, LatencyStats

ALL = "all"


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Of one class. Times are of the requests that ended well, from when they were due; None where there is nothing to
    time. `itl` pools the gaps between the tokens of all requests; `tpot` is each one's mean gap; `num_good` met the
    SLO. `num_prompt` tokens of those requests; `num_output` tokens that clients got, of failed requests too; `errors`:
    how many ended with each kind and, where they were refused, for which reason."""

    name: str
    num_requests: int
    num_complete: int
    num_good: int
    num_prompt: int
    num_output: int
    errors: dict[str, int]
    ttft: LatencySummary | None
    itl: LatencySummary | None
    tpot: LatencySummary | None
    e2e: LatencySummary | None


@dataclass(frozen=True, slots=True)
class PoolReport:
    """`utilisation`: the share of the run during which a worker of the pool computed. Rates are tokens per second of
    all its workers, as their steps counted them; `worker_rate` is of one, both kinds together. `mean_batch`: sequences
    that decode in a step, on average."""

    pool: Pool
    num_workers: int
    utilisation: float
    mean_batch: float
    prefill_rate: float
    decode_rate: float
    worker_rate: float
    num_preempted: int


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """`wall_s` lasts from the first request's due time to the last end. `output_rate` counts tokens that clients got;
    `good_rate` is goodput: requests per second that met the SLO, and `good_share` their share of all; `errors` how many
    requests ended with each kind. `cached_share` of prompt tokens came from prefix caches. `kv_rate`: bytes of KV per
    second between workers; `busiest_link_share`: what it takes of the busiest worker's link. The first of `groups` is
    all requests. Costs are in the currency of the prices, None unless set; each of the two carries the whole cost.
    """

    num_requests: int
    wall_s: float
    request_rate: float
    good_rate: float
    good_share: float
    prompt_rate: float
    output_rate: float
    cached_share: float
    kv_rate: float
    busiest_link_share: float
    errors: dict[str, int]
    groups: tuple[GroupReport, ...]
    pools: tuple[PoolReport, ...]
    price_per_hour: float
    cost_per_million_output: float | None
    cost_per_million_prompt: float | None
    digest: str
    num_events: int


def report(cluster: SimCluster, tally: LatencyStats) -> SimulationReport:
    """Add a run up. Raises ValueError without requests."""
    if not tally.groups:
        raise ValueError("a report needs requests that have ended")
    whole = tally.all()
    wall_s = tally.ended_s - tally.began_s
    price = sum(worker.spec.price_per_hour for worker in cluster.workers)
    return SimulationReport(
        num_requests=whole.num_requests,
        wall_s=wall_s,
        request_rate=_share(whole.num_complete, wall_s),
        good_rate=_share(whole.num_good, wall_s),
        good_share=whole.num_good / whole.num_requests,
        prompt_rate=_share(whole.num_prompt, wall_s),
        output_rate=_share(whole.num_output, wall_s),
        cached_share=_share(whole.num_cached, whole.num_prompt),
        kv_rate=_share(cluster.num_read_bytes, wall_s),
        busiest_link_share=_share(cluster.busiest_link_s, wall_s),
        errors=dict(sorted(whole.errors.items())),
        groups=(_group(ALL, whole), *(_group(name, tally.groups[name]) for name in sorted(tally.groups))),
        pools=_pools(cluster.workers, wall_s),
        price_per_hour=price,
        cost_per_million_output=_cost(price, wall_s, whole.num_output),
        cost_per_million_prompt=_cost(price, wall_s, whole.num_prompt),
        digest=cluster.digest,
        num_events=cluster.num_events,
    )


def _share(part: float, whole: float) -> float:
    """A run in which all are refused at once lasts no time."""
    return part / whole if whole else 0.0


def _cost(price_per_hour: float, wall_s: float, num_tokens: int) -> float | None:
    return price_per_hour * wall_s / 3600 / num_tokens * 1e6 if price_per_hour and num_tokens else None


def _group(name: str, tally: GroupTally) -> GroupReport:
    return GroupReport(
        name,
        tally.num_requests,
        tally.num_complete,
        tally.num_good,
        tally.num_prompt,
        tally.num_output,
        dict(sorted(tally.errors.items())),
        ttft=tally.ttft.spread(),
        itl=tally.itl.spread(),
        tpot=tally.tpot.spread(),
        e2e=tally.e2e.spread(),
    )


def _pools(workers: Sequence[SimWorker], wall_s: float) -> tuple[PoolReport, ...]:
    names = sorted({worker.spec.pool for worker in workers})
    return tuple(_pool(name, [w for w in workers if w.spec.pool == name], wall_s) for name in names)


def _pool(name: Pool, workers: Sequence[SimWorker], wall_s: float) -> PoolReport:
    num_prefill = sum(w.num_prefill_tokens for w in workers)
    num_decode = sum(w.num_decode_tokens for w in workers)
    return PoolReport(
        pool=name,
        num_workers=len(workers),
        utilisation=_share(sum(w.busy_s for w in workers), len(workers) * wall_s),
        mean_batch=_share(num_decode, sum(w.num_steps for w in workers)),
        prefill_rate=_share(num_prefill, wall_s),
        decode_rate=_share(num_decode, wall_s),
        worker_rate=_share(num_prefill + num_decode, len(workers) * wall_s),
        num_preempted=sum(w.engine.num_preempted for w in workers),
    )
