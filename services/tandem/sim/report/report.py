"""Aggregate the requests of a simulated run as they end, and compute its report: latencies, rates, utilisation, costs.

The aggregates take memory that does not grow with the number of requests.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from tandem.core.config import Pool
from tandem.core.errors import TandemError
from tandem.core.events import Finished
from tandem.core.lane import lane_labels
from tandem.core.quantile_sketch import LatencySummary, QuantileSketch
from tandem.core.slo import Slo
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.worker import SimWorker

ALL = "all"


@dataclass(slots=True)
class GroupTally:
    """Counts and latency distributions of one class of requests.

    - `ttft`, `itl`, `tpot`, `e2e`: seconds of complete requests; `ttft` and `e2e` count from the due time.
    - `num_good`: requests that met the SLO. `num_late`: requests that failed or whose first token missed its target.
      `num_late_gaps`: token gaps above the ITL target.
    - `num_cached`: prompt tokens served from prefix caches, out of `num_prompt`; both of complete requests only.
    - `num_output`: tokens that clients received, including those of failed requests.
    - `errors`: failed requests by the kind of their error.
    """

    num_requests: int = 0
    num_complete: int = 0
    num_good: int = 0
    num_late: int = 0
    num_late_gaps: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    ttft: QuantileSketch = field(default_factory=QuantileSketch)
    itl: QuantileSketch = field(default_factory=QuantileSketch)
    tpot: QuantileSketch = field(default_factory=QuantileSketch)
    e2e: QuantileSketch = field(default_factory=QuantileSketch)

    def add(self, trace: ClientTrace, slo: Slo) -> None:
        self.num_requests += 1
        self.num_output += len(trace.token_times)
        ttft_s = trace.ttft_s if trace.is_complete else None
        self.num_late += slo.violates_ttft(ttft_s)
        outcome = trace.outcome
        if not isinstance(outcome, Finished):
            assert outcome is not None, f"{trace.id} has no end"
            self.errors[_error_label(outcome)] += 1
        if ttft_s is None:
            return
        assert isinstance(outcome, Finished)
        gaps = trace.gaps_s
        num_late_gaps = slo.num_late(gaps)
        self.num_complete += 1
        self.num_good += slo.is_met(ttft_s, num_late_gaps, len(gaps))
        self.num_late_gaps += num_late_gaps
        self.num_prompt += trace.num_prompt
        self.num_cached += outcome.num_cached_tokens
        self.ttft.add(ttft_s)
        self.e2e.add(trace.token_times[-1] - trace.due_s)
        if gaps:
            self.itl.extend(gaps)
            self.tpot.add((trace.token_times[-1] - trace.token_times[0]) / len(gaps))

    def merge(self, other: GroupTally) -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, QuantileSketch):
                mine.merge(theirs)
            else:
                setattr(self, each.name, mine + theirs)


def _error_label(error: TandemError) -> str:
    """Return the kind of an error and its reason, such as `quota_exceeded (tokens_per_minute)`."""
    return f"{error.kind.value} ({error.reason})" if error.reason else error.kind.value


class LatencyStats:
    """Count the requests and latencies of a run by class.

    `slo`: the targets that requests are compared with; `groups`: the tally of each class by name; `began_s`: the
    earliest due time; `ended_s`: the last end.
    """

    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self.groups: defaultdict[str, GroupTally] = defaultdict(GroupTally)
        self.began_s = math.inf
        self.ended_s = -math.inf

    def add(self, trace: ClientTrace) -> None:
        """Add a request that has ended to the tally of its class."""
        self.began_s = min(self.began_s, trace.due_s)
        self.ended_s = max(self.ended_s, trace.ended_at)
        self.groups[trace.group].add(trace, self.slo)

    def all(self) -> GroupTally:
        """Return the tally of all classes together."""
        whole = GroupTally()
        for name in sorted(self.groups):
            whole.merge(self.groups[name])
        return whole


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Report of one class of requests.

    - `ttft`, `e2e`: seconds from the due time of a request to its first and to its last token; `itl`: the gaps between
      tokens; `tpot`: the mean gap of each request. All are of complete requests, and None without samples.
    - `num_good`: requests that met the SLO. `num_prompt`: prompt tokens of complete requests. `num_output`: tokens that
      clients received, including those of failed requests.
    - `errors`: requests by kind of error and, for refused ones, its reason.
    """

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
    """Report of the workers of one pool that serve the same lanes.

    - `lanes`: labels of these lanes; empty for all lanes. `num_workers`: all workers that there were during the run.
    - `utilisation`: mean share of its time in the run during which a worker of the pool computed.
    - `prefill_rate`, `decode_rate`: prompt tokens and decoded tokens per second that the steps of all workers computed;
      `worker_rate`: the sum of both, per worker.
    - `mean_batch`: mean number of decoding sequences in a step.
    - `num_preempted`: preemptions of sequences.
    """

    pool: Pool
    lanes: tuple[str, ...]
    num_workers: int
    utilisation: float
    mean_batch: float
    prefill_rate: float
    decode_rate: float
    worker_rate: float
    num_preempted: int


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Report of a whole simulated run; rates are per second of `wall_s`.

    - `wall_s`: virtual seconds from the first request's due time to the last end.
    - `request_rate`, `prompt_rate`: complete requests, and their prompt tokens.
    - `good_rate`: goodput, the requests per second that met the SLO; `good_share`: their share of all requests.
    - `output_rate`: tokens that clients received. `errors`: requests by kind of error.
    - `cached_share`: share of prompt tokens that prefix caches served.
    - `kv_rate`: bytes of KV between workers; `busiest_link_share`: the used share of the busiest worker's link.
    - `groups`: all requests first, then one report for each class.
    - `price_per_hour`: of all workers, on average over the run; 0 without prices.
    - `cost_per_million_output`, `cost_per_million_prompt`: each is the whole cost of the run divided by that kind of
      tokens, in the currency of the prices; None without prices.
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


def report(
    cluster: SimCluster, tally: LatencyStats, shares: Mapping[SimWorker, float] | None = None
) -> SimulationReport:
    """Return the report of a run that has ended. Raises ValueError without requests.

    `shares`: the share of the run's time during which each worker is paid for and counts in its pool; 1 for workers
    that are left out."""
    if not tally.groups:
        raise ValueError("a report needs requests that have ended")
    whole = tally.all()
    wall_s = tally.ended_s - tally.began_s
    paid = {worker: (shares or {}).get(worker, 1.0) for worker in (*cluster.workers, *cluster.gone)}
    price = sum(worker.spec.price_per_hour * share for worker, share in paid.items())
    return SimulationReport(
        num_requests=whole.num_requests,
        wall_s=wall_s,
        request_rate=_share(whole.num_complete, wall_s),
        good_rate=_share(whole.num_good, wall_s),
        good_share=whole.num_good / whole.num_requests,
        prompt_rate=_share(whole.num_prompt, wall_s),
        output_rate=_share(whole.num_output, wall_s),
        cached_share=_share(whole.num_cached, whole.num_prompt),
        kv_rate=_share(cluster.fabric.num_bytes, wall_s),
        busiest_link_share=_share(cluster.fabric.busiest_s, wall_s),
        errors=dict(sorted(whole.errors.items())),
        groups=(_group(ALL, whole), *(_group(name, tally.groups[name]) for name in sorted(tally.groups))),
        pools=_pools(paid, wall_s),
        price_per_hour=price,
        cost_per_million_output=_cost(price, wall_s, whole.num_output),
        cost_per_million_prompt=_cost(price, wall_s, whole.num_prompt),
        digest=cluster.digest,
        num_events=cluster.num_events,
    )


def _share(part: float, whole: float) -> float:
    """Return `part / whole`; 0 when `whole` is 0, as for the duration of a run in which every request is refused."""
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


def _pools(paid: Mapping[SimWorker, float], wall_s: float) -> tuple[PoolReport, ...]:
    by_kind: defaultdict[tuple[Pool, tuple[str, ...]], dict[SimWorker, float]] = defaultdict(dict)
    for worker, share in paid.items():
        by_kind[worker.spec.pool, lane_labels(worker.spec.lanes)][worker] = share
    return tuple(_pool(pool, lanes, by_kind[pool, lanes], wall_s) for pool, lanes in sorted(by_kind))


def _pool(pool: Pool, lanes: tuple[str, ...], workers: Mapping[SimWorker, float], wall_s: float) -> PoolReport:
    paid_s = sum(workers.values()) * wall_s
    num_prefill = sum(w.num_prefill_tokens for w in workers)
    num_decode = sum(w.num_decode_tokens for w in workers)
    return PoolReport(
        pool=pool,
        lanes=lanes,
        num_workers=len(workers),
        utilisation=_share(sum(w.busy_s for w in workers), paid_s),
        mean_batch=_share(num_decode, sum(w.num_steps for w in workers)),
        prefill_rate=_share(num_prefill, wall_s),
        decode_rate=_share(num_decode, wall_s),
        worker_rate=_share(num_prefill + num_decode, paid_s),
        num_preempted=sum(w.engine.num_preempted for w in workers),
    )
