"""Test routing policies over whole runs, and several gateways with the same workers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.cluster.routing import TRACE, RoutingOutcome, RoutingSetting, compare
from tandem.core.config import GatewayConfig, RoutingPolicy
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.routing.placement import Placement
from tandem.routing.router import place
from tandem.routing.routing_request import RoutingRequest
from tandem.routing.worker_view import WorkerView
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cost.executor import token_at
from tandem.workload.scheduled_request import ScheduledRequest
from tests.simulation.clusters import gpu_spec, prompt, run, scheduled
from tests.unit.routing.rankings import ranking_of


def talks(num_talks: int, num_turns: int, unit: int) -> list[ScheduledRequest]:
    """Conversations of which each turn repeats all before it; they come by turns, long ones among short ones. `unit`
    scales their prompts, and with them the time between two requests."""
    schedule = []
    for turn in range(num_turns):
        for talk in range(num_talks):
            length = unit * ((50 if talk % 4 else 240) + 9 * turn)
            number = turn * num_talks + talk
            schedule.append(scheduled(number, number * unit * 3e-4, prompt(talk, length), 40))
    return schedule


def spec_of(num_prefill: int, num_decode: int, gateway: GatewayConfig) -> ClusterSpec:
    workers = ((gpu_spec("prefill", max_num_batched_tokens=8192), num_prefill), (gpu_spec("decode"), num_decode))
    return ClusterSpec(workers=workers, gateway=gateway)


def spent(policy: RoutingPolicy, schedule: list[ScheduledRequest], num_decode: int) -> tuple[float, float]:
    """The share of prompts that was cached, and the 95th percentile of TTFT."""
    traces = run(SimCluster(spec_of(4, num_decode, GatewayConfig(routing_policy=policy))), schedule)
    num_cached = sum(trace.outcome.num_cached_tokens for trace in traces)  # type: ignore[union-attr]
    return num_cached / sum(t.num_prompt for t in traces), sorted(t.ttft_s for t in traces)[int(0.95 * len(traces))]


@pytest.mark.parametrize(
    ("num_talks", "num_turns", "unit", "num_decode"),
    [(16, 4, 50, 2), pytest.param(32, 6, 100, 3, marks=pytest.mark.nightly)],
)
def test_on_conversations_the_cost_finds_the_prefixes_and_keeps_the_tail_short(
    num_talks: int, num_turns: int, unit: int, num_decode: int
) -> None:
    """What only follows prefixes does as well here, where each conversation stays with one of few workers."""
    schedule = talks(num_talks, num_turns, unit)
    found = {
        policy: spent(policy, schedule, num_decode) for policy in ("cost", "random", "round_robin", "least_loaded")
    }
    share, tail_s = found.pop("cost")
    assert share > 1.05 * max(share for share, _ in found.values())
    assert tail_s < 0.95 * min(tail_s for _, tail_s in found.values())


def traces() -> str:
    path = Path(os.environ.get("TANDEM_TRACES", "/nowhere")) / TRACE
    if not path.is_file():
        pytest.skip(f"TANDEM_TRACES names no folder with {TRACE}")
    return str(path)


@pytest.mark.nightly
def test_on_a_recorded_trace_too() -> None:
    setting = RoutingSetting(workload=traces(), pools="prefill=3,decode=2", speedup=3.0, count=120, seed=1)

    def tail(outcome: RoutingOutcome) -> float:
        ttft = outcome.report.groups[0].ttft
        assert ttft is not None
        return ttft.p99

    cost, random = (compare(setting, policy) for policy in ("cost", "random"))
    assert cost.report.errors == {}
    assert cost.report.cached_share >= random.report.cached_share
    # So few requests have their longest prompt for a tail, which no placement makes shorter.
    assert tail(cost) < 1.05 * tail(random)


def test_hits_that_are_seen_late_are_missed() -> None:
    spec = spec_of(4, 2, GatewayConfig())

    def cached(delay_s: float) -> int:
        done = run(SimCluster(replace(spec, index_delay_s=delay_s)), talks(16, 3, unit=50))
        return sum(trace.outcome.num_cached_tokens for trace in done)  # type: ignore[union-attr]

    assert cached(0.05) > 1.4 * cached(1e9)


def answered(*, num_gateways: int, remote_prefix: bool) -> tuple[int, int]:
    """Tokens that were cached and those of them that were read from others, where each second turn repeats an answer
    that only a worker that decodes has."""
    spec = replace(spec_of(2, 2, GatewayConfig(remote_prefix=remote_prefix)), num_gateways=num_gateways)
    schedule = []
    for number in range(12):
        turn, talk = divmod(number, 6)
        first, answer = prompt(talk, 2000), tuple(token_at(talk, 0, index) for index in range(1200))
        tokens = first if turn == 0 else (*first, *answer, *range(100))
        schedule.append(scheduled(number, 30.0 * turn + 0.1 * talk, tokens, 1200 if turn == 0 else 4, seed=talk))
    cluster = SimCluster(spec)
    traces = run(cluster, schedule)
    return sum(t.outcome.num_cached_tokens for t in traces), cluster.num_remote_hit_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize("num_gateways", [1, 3])
def test_an_answer_that_only_its_decode_worker_has_is_read_from_there(num_gateways: int) -> None:
    """All gateways see the same prefix index, whichever of them placed the request."""
    cached, fetched = answered(num_gateways=num_gateways, remote_prefix=True)
    alone, none = answered(num_gateways=num_gateways, remote_prefix=False)
    assert none == 0 and alone <= 6 * 2000
    assert fetched >= 6 * 1184 and cached >= 6 * (2000 + 1184), "all but the last block or so of each"


GPU = StepCost(2e-3, 3e-5, 2e-5, 1e-8, 1e-9)


class Gateways:
    """Several, each of which knows what workers reported a while ago and what it placed itself since."""

    def __init__(self, num_gateways: int, num_workers: int) -> None:
        refs = [WorkerRef(WorkerId(f"w{i}"), Incarnation(1), "") for i in range(num_workers)]
        self.queued = dict.fromkeys(refs, 0)
        self.reported = dict(self.queued)
        self.own: list[dict[WorkerRef, list[int]]] = [{ref: [] for ref in refs} for _ in range(num_gateways)]

    def report(self) -> None:
        self.reported = dict(self.queued)
        for own in self.own:
            for placed in own.values():
                placed.clear()

    def submit(self, number: int, num_tokens: int) -> None:
        own = self.own[number % len(self.own)]
        views = [
            WorkerView(ref, "mixed", "m", "f", WorkerLoad(num_queued_tokens=num), tuple(own[ref]), GPU)
            for ref, num in self.reported.items()
        ]
        placed = place(
            ranking_of(views),
            RoutingRequest("m", num_tokens, num_prompt=num_tokens, hits={}, key=f"r{number}", mode="off"),
        )
        assert isinstance(placed, Placement)
        own[placed.prefill].append(num_tokens)
        self.queued[placed.prefill] += num_tokens


@pytest.mark.parametrize("num_gateways", [1, 4])
def test_gateways_on_one_fleet_do_not_herd(num_gateways: int) -> None:
    """Between two reports each of four places 24 equal prompts on eight workers, and none knows of the others'."""
    fleet = Gateways(num_gateways, 8)
    for number in range(10 * 96):
        if number % 96 == 0:
            fleet.report()
        fleet.submit(number, 500)
    mean = sum(fleet.queued.values()) / 8
    assert max(fleet.queued.values()) < 1.25 * mean and min(fleet.queued.values()) > 0.75 * mean


def test_what_each_gateway_alone_would_overload_is_shared() -> None:
    """One worker is a little cheaper than all others: a burst of four gateways does not go there as a whole."""
    fleet = Gateways(4, 8)
    for ref in list(fleet.queued)[1:]:
        fleet.queued[ref] = 40
    fleet.report()
    for number in range(32):
        fleet.submit(number, 500)
    taken = {ref.id: num // 500 for ref, num in fleet.queued.items()}
    assert max(taken.values()) <= 8 and sum(num > 0 for num in taken.values()) == 8, taken
