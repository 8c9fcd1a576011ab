"""Tenants beside each other on a simulated cluster: a flood does not reach its neighbour, shares of tokens are equal,
lanes are strict, and waiting at the gateway costs no throughput."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from tandem.admission.tenant import Tenant
from tandem.core.config import EngineConfig, GatewayConfig, Pool, WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import TenantId
from tandem.core.lane import Lane
from tandem.core.slo import Slo
from tandem.sched.state.slo_targets import LatencyTargets
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.worker import WorkerSpec
from tandem.workload.mix import Mix, scheduled_requests
from tandem.workload.request_class import Prefix, RequestClass
from tests.simulation.clusters import gpu_spec, slow_spec, traces_of

A, B = TenantId("a"), TenantId("b")
LINE = GatewayConfig(max_queued=100_000)
SHORT = RequestClass("b", 1.0, (32, 128), (16, 64), tenant="b")
LONG = RequestClass("a", 1.0, (2000, 4000), (16, 64), tenant="a")
SHORT_RATE, FLOOD_RATE = 120.0, 48.0
"""Requests per second. In steps of 192 tokens a worker computes some 24,000 of prompts per second: the flood is
144,000, more than ten times the half of it, and its neighbour's are 9,600."""


def pair(budget: int) -> tuple[tuple[WorkerSpec, int], ...]:
    pools: tuple[Pool, ...] = ("prefill", "decode")
    return tuple((gpu_spec(pool, max_num_batched_tokens=budget), 1) for pool in pools)


def run(groups: list[RequestClass], rate: float, count: int, spec: ClusterSpec, seed: int = 1) -> list[ClientTrace]:
    return traces_of(SimCluster(spec), scheduled_requests(Mix(tuple(groups)), seed, count, rate))


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def jain(shares: list[float]) -> float:
    """Jain, Chiu and Hawe, 1984: 1 where all are equal."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


@pytest.mark.parametrize("count", [150, pytest.param(500, marks=pytest.mark.nightly)])
def test_a_flood_of_long_prompts_does_not_reach_a_neighbour_within_its_share(count: int) -> None:
    """Fairness alone; no quota keeps anything of the flood out. The step budget is small: beside a flood every step is
    full, so that with 256 tokens in it, or 512, a prompt of 80 takes twice as long as in a step of its own."""
    spec, rate = ClusterSpec(workers=pair(192), gateway=LINE), SHORT_RATE + FLOOD_RATE
    alone = run([SHORT], SHORT_RATE, count, spec)
    both = run(
        [replace(SHORT, share=SHORT_RATE / rate), replace(LONG, share=FLOOD_RATE / rate)],
        rate, round(count * rate / SHORT_RATE), spec,
    )  # fmt: skip
    before = p99([trace.ttft_s for trace in alone])
    beside = p99([trace.ttft_s for trace in both if trace.tenant == "b"])
    assert all(trace.is_complete for trace in both)
    assert beside <= 1.3 * before, f"p99 of TTFT: {1e3 * before:.1f} ms alone, {1e3 * beside:.1f} ms beside a flood"


@pytest.mark.parametrize(
    ("seed", "rate"), [(1, 30.0), *(pytest.param(seed, 60.0, marks=pytest.mark.nightly) for seed in (1, 2, 3))]
)
def test_ten_times_a_quota_of_long_prompts_does_not_reach_a_neighbour_within_its_own(seed: int, rate: float) -> None:
    """At default settings. The flood begins with a whole bucket, which lets a minute's worth in at once. The
    neighbour's prompts are an eighth as long; those of 80 tokens would feel each full step for a long one."""
    quota, count = 20_000, round(10 * rate)
    flood = 10 * quota / 60 / 3040
    short = RequestClass("b", 1.0, (256, 448), (2, 4), tenant="b")
    long = RequestClass("a", 1.0, (2000, 4000), (2, 4), tenant="a")
    terms = {A: Tenant(id=A, tokens_per_minute=quota), B: Tenant(id=B, tokens_per_minute=3_000_000)}
    budget = EngineConfig().max_num_batched_tokens
    spec = ClusterSpec(workers=pair(budget), gateway=GatewayConfig(), tenants=terms)
    alone = run([short], rate, count, spec, seed)
    shares = [replace(short, share=rate / (rate + flood)), replace(long, share=flood / (rate + flood))]
    both = run(shares, rate + flood, round(count * (rate + flood) / rate), spec, seed)
    ours, theirs = ([trace for trace in both if trace.tenant == name] for name in "ba")
    assert all(trace.is_complete for trace in (*alone, *ours))
    refused = [trace.outcome.reason for trace in theirs if isinstance(trace.outcome, TandemError)]
    assert refused and set(refused) == {"tokens_per_minute"}
    before, beside = p99([trace.ttft_s for trace in alone]), p99([trace.ttft_s for trace in ours])
    assert beside <= 1.3 * before, f"p99 of TTFT: {1e3 * before:.1f} ms alone, {1e3 * beside:.1f} ms beside a flood"


@pytest.mark.parametrize("tenants", ["aaa", "abc"])
@pytest.mark.parametrize(
    ("budget", "count"), [(256, 60), *(pytest.param(n, 200, marks=pytest.mark.nightly) for n in (128, 256))]
)
def test_prompts_of_each_size_wait_at_the_gateway_no_longer_than_a_worker_would_let_them(
    budget: int, count: int, tenants: str
) -> None:
    """Against workers that hold all prompts and order them. When two steps were all that was taken beside the longest
    prompt of any size, with 256 tokens in a step prompts of 600 waited for those of 16,000: ten times as long."""
    shares = (("short", 0.7, (64, 200)), ("medium", 0.2, (550, 650)), ("long", 0.1, (16000, 16000)))
    groups = [
        RequestClass(name, share, n, (8, 32), tenant=t) for (name, share, n), t in zip(shares, tenants, strict=True)
    ]
    found: list[dict[str, float]] = []
    for horizon_ms in (0.0, 1e9):
        spec = gpu_spec(max_num_batched_tokens=budget)
        spec = replace(spec, config=replace(spec.config, worker=WorkerConfig(queue_horizon_ms=horizon_ms)))
        traces = run(groups, 10.0, count, ClusterSpec(workers=((spec, 1),), gateway=LINE))
        found.append({name: p99([t.ttft_s for t in traces if t.group == name]) for name, *_ in shares})
    kept, free = found
    for name in kept:
        assert kept[name] <= 1.5 * free[name], f"p99 of TTFT: {kept}, without a horizon {free}"


def tokens_by(traces: list[ClientTrace], until: float) -> dict[str, int]:
    """Count the tokens of prompts whose first token arrived, and of output, by tenant."""
    found: dict[str, int] = {}
    for trace in traces:
        sampled = sum(time <= until for time in trace.token_times)
        found[trace.tenant] = found.get(trace.tenant, 0) + sampled + (trace.num_prompt if sampled else 0)
    return found


@pytest.mark.parametrize("weights", [(1.0, 2.0, 1.0, 4.0, 1.0), pytest.param((1.0,) * 5, marks=pytest.mark.nightly)])
def test_tenants_that_always_wait_share_tokens_by_their_weights(weights: tuple[float, ...]) -> None:
    lengths = (50, 100, 200, 400, 800)
    total = sum(1 / n for n in lengths)
    groups = [RequestClass(f"t{n}", 1 / n / total, (n, n), (n // 10, n // 10), tenant=f"t{n}") for n in lengths]
    names = [TenantId(f"t{n}") for n in lengths]
    tenants = {n: Tenant(id=n, weight=w) for n, w in zip(names, weights, strict=True)}
    traces = run(groups, 0.0, 800, ClusterSpec(workers=pair(256), gateway=LINE, tenants=tenants))
    # While everybody still waits: until the first tenant's last request is sent, with a margin.
    until = 0.7 * min(max(t.token_times[0] for t in traces if t.tenant == f"t{n}") for n in lengths)
    served = tokens_by(traces, until)
    shares = [served[f"t{n}"] / weight for n, weight in zip(lengths, weights, strict=True)]
    assert jain(shares) >= 0.99, served


def test_a_lane_is_served_before_those_below_it() -> None:
    groups = [
        RequestClass(lane.label, 1 / 3, (200, 200), (4, 4), tenant=lane.label, lane=lane) for lane in reversed(Lane)
    ]
    traces = run(groups, 0.0, 90, ClusterSpec(workers=((slow_spec(), 1),), gateway=LINE))
    firsts = {lane: sorted(t.token_times[0] for t in traces if t.group == lane.label) for lane in Lane}
    # What was sent before the first of a more urgent lane came is done; all arrive at once, in any order.
    assert firsts[Lane.INTERACTIVE][-1] < firsts[Lane.STANDARD][8] < firsts[Lane.STANDARD][-1] < firsts[Lane.BATCH][8]


PAIRS = pytest.mark.parametrize(
    ("pools", "count"),
    [
        (("prefill", "decode"), 80),
        pytest.param(("prefill", "decode"), 150, marks=pytest.mark.nightly),
        pytest.param(("mixed", "mixed"), 150, marks=pytest.mark.nightly),
    ],
)


def all_at_once(pools: tuple[Pool, ...], count: int, horizon_ms: float, tenants: str) -> list[ClientTrace]:
    specs = [gpu_spec(pool, max_num_batched_tokens=512) for pool in pools]
    settings = WorkerConfig(queue_horizon_ms=horizon_ms)
    workers = tuple((replace(spec, config=replace(spec.config, worker=settings)), 1) for spec in specs)
    groups = [
        RequestClass("short", 0.7, (16, 200), (8, 64), tenant=tenants[0]),
        RequestClass("long", 0.3, (1000, 3000), (8, 64), tenant=tenants[1]),
    ]
    return run(groups, 0.0, count, ClusterSpec(workers=workers, gateway=LINE))


@PAIRS
def test_what_waits_at_the_gateway_costs_no_throughput(pools: tuple[Pool, ...], count: int) -> None:
    kept, free = (max(t.ended_at for t in all_at_once(pools, count, horizon_ms, "ab")) for horizon_ms in (0.0, 1e9))
    assert kept <= 1.03 * free


@PAIRS
def test_the_queue_of_one_tenant_serves_short_prompts_as_early_as_workers_would(
    pools: tuple[Pool, ...], count: int
) -> None:
    """Against workers that hold all prompts and order them: in order of arrival the median was twice to thirty times
    as late."""
    kept, free = (sorted(t.ttft_s for t in all_at_once(pools, count, horizon_ms, "aa")) for horizon_ms in (0.0, 1e9))
    middle = len(kept) // 2
    assert kept[middle] <= 1.25 * free[middle] and kept[-1] <= 1.03 * free[-1]


def test_what_would_miss_its_lane_s_target_is_refused_before_any_work_is_done_for_it() -> None:
    targets = LatencyTargets(interactive=Slo(ttft_s=2.0))
    spec = ClusterSpec(workers=((slow_spec(), 1),), gateway=LINE, targets=targets)
    alike = [RequestClass("one", 1.0, (400, 400), (2, 2))]
    traces = run(alike, 20.0, 60, spec)
    refused = [trace for trace in traces if isinstance(trace.outcome, TandemError)]
    errors = [trace.outcome for trace in refused if isinstance(trace.outcome, TandemError)]
    assert 0 < len(refused) < len(traces) and not any(len(trace.token_times) for trace in refused)
    assert {(error.kind, error.reason) for error in errors} == {(ErrorKind.SLO_MISS, "predicted_ttft")}
    assert all(error.retry_after_s is not None and error.retry_after_s > 0 for error in errors)
    kept = [trace.ttft_s for trace in traces if trace.is_complete]
    free = run(alike, 20.0, 60, ClusterSpec(workers=spec.workers, gateway=LINE))
    assert max(kept) < 2 * 2.0 < max(trace.ttft_s for trace in free)
    off = replace(spec, gateway=replace(LINE, early_rejection="off"))
    assert all(trace.is_complete for trace in run(alike, 20.0, 60, off))


def test_a_full_queue_rejects_the_flood_and_not_its_neighbour() -> None:
    spec = ClusterSpec(workers=((slow_spec(), 1),), gateway=GatewayConfig(max_queued=16))
    groups = [
        RequestClass("a", 0.8, (400, 400), (2, 2), tenant="a"),
        RequestClass("b", 0.2, (50, 50), (2, 2), tenant="b"),
    ]
    traces = run(groups, 10.0, 100, spec)
    lost = [trace for trace in traces if isinstance(trace.outcome, TandemError)]
    assert lost and {trace.tenant for trace in lost} == {"a"}
    assert {trace.outcome.reason for trace in lost if isinstance(trace.outcome, TandemError)} == {"queue_full"}


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3))])
def test_a_tenant_that_holds_the_kv_leaves_its_neighbour_a_share_where_kv_time_counts(seed: int) -> None:
    """A worker holds some seven of the long requests, whose prompts are cached but for a few tokens. More of them
    arrive than it can hold, and a chat that computes more tokens."""
    long = RequestClass("a", 0.2, (20, 60), (300, 400), tenant="a", prefix=Prefix((1600, 1600), num_documents=8))
    chat = RequestClass("b", 0.8, (200, 400), (16, 64), tenant="b")
    worker = replace(gpu_spec(), num_blocks=800)
    found: list[float] = []
    for kv_time_tokens in (0.0, 2000.0):
        spec = ClusterSpec(workers=((worker, 1),), gateway=replace(LINE, kv_time_tokens=kv_time_tokens))
        traces = run([long, chat], 40.0, 250, spec, seed)
        assert all(trace.is_complete for trace in traces)
        found.append(statistics.mean(trace.ttft_s for trace in traces if trace.tenant == "b"))
    before, after = found
    assert after < 0.7 * before, f"mean TTFT of the chat: {before:.2f} s, {after:.2f} s with charges for KV time"
