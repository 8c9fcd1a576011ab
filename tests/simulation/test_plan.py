"""A plan is what trying everything finds, and its bounds never forbid what holds; never a time of this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest

from tandem.core.config import Config, EngineConfig, Pool
from tandem.core.slo import Slo
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.planner.break_even import along, changes, lengthened
from tandem.sim.planner.capacity_planner import CapacityPlanner, Plan
from tandem.sim.planner.deployment_kind import DeploymentKind, recipes
from tandem.sim.planner.plan_table import break_even, format_plan
from tandem.sim.planner.slo_check import SloTarget
from tandem.sim.planner.workload_demand import demand
from tandem.workload.mix import RequestClass, poisson
from tandem.workload.scheduled_request import ScheduledRequest
from tests.simulation.clusters import LAPTOP, mix, slow_spec

CONFIG = Config(engine=EngineConfig(max_num_batched_tokens=512, max_num_seqs=64))


@dataclass(frozen=True)
class Laptop:
    """A machine of which `degree` make a worker so many times as fast; it is small in every way."""

    price_per_hour: float = 1.0
    name: str = "laptop"
    about: tuple[tuple[str, str], ...] = (("profile", "of a test"),)
    latency_s: float = 2e-4
    delivery_s: tuple[float, ...] = (0.0,)

    def worker(self, pool: Pool, degree: int, config: Config) -> WorkerSpec:
        if degree > 2:
            raise ValueError(f"cannot be cut into {degree}")
        cost = LAPTOP.scaled(1 / degree)
        return replace(
            slow_spec(pool), step_time=cost.predict, calibration=cost, config=config, price_per_hour=degree * 1.0
        )


def slo_target(slo: Slo, rate: float, count: int = 60, percentile: float = 90.0, seed: int = 3) -> SloTarget:
    return SloTarget(mix(seed, count, rate), slo, percentile, seed)


def planned(one: SloTarget, candidates: list[DeploymentKind], max_gpus: int = 8) -> tuple[CapacityPlanner, Plan]:
    count = len(one.requests)
    second = replace(one, seed=one.seed + 1, requests=mix(one.seed + 1, count, count / one.requests[-1].due_s))
    planner = CapacityPlanner(one, second, demand(one.requests, 16, has_cache=True), max_gpus, lambda _: None)
    return planner, planner.find(candidates)


def of_laptops(
    slo: Slo, degrees: tuple[int, ...] = (1,), budgets: tuple[int, ...] = (256, 512)
) -> list[DeploymentKind]:
    return list(recipes(Laptop(), degrees, budgets, CONFIG, slo))


@pytest.mark.parametrize(
    ("slo", "rate", "count", "max_gpus"),
    [
        (Slo(ttft_s=7.0), 2.0, 20, 3),
        pytest.param(Slo(ttft_s=7.0), 2.0, 40, 4, marks=pytest.mark.nightly),
        pytest.param(Slo(ttft_s=9.0, itl_s=0.12), 0.8, 40, 4, marks=pytest.mark.nightly),
    ],
)
def test_the_plan_is_the_cheapest_of_all_that_hold(slo: Slo, rate: float, count: int, max_gpus: int) -> None:
    one, candidates = slo_target(slo, rate, count), of_laptops(slo)
    _, plan = planned(one, candidates, max_gpus)
    for kind, width in (("mixed", 1), ("split", 2)):
        holding = [
            recipe.cost(numbers)
            for recipe in candidates
            if recipe.kind == kind
            for numbers in product(range(1, max_gpus + 1), repeat=width)
            if sum(numbers) <= max_gpus and one.tried(recipe.deployment(numbers)).holds
        ]
        best = plan.best.get(kind)  # type: ignore[call-overload]
        if not holding:
            assert best is None
        else:
            assert best is not None and best.first.holds
            cheapest, *_ = *best.fewer, best.first
            assert cheapest.deployment.price_per_hour == min(holding)


def test_bounds_never_forbid_what_holds() -> None:
    slo = Slo(ttft_s=8.0, itl_s=0.5)
    one = slo_target(slo, rate=3.0, count=30)
    needs = demand(one.requests, 16, has_cache=True)
    for recipe in of_laptops(slo, degrees=(1, 2), budgets=(512,)):
        low = recipe.least(needs, slo, one.percentile)
        assert not isinstance(low, str)
        for numbers in product((1, 2, 3), repeat=len(low)):
            if any(number < bound for number, bound in zip(numbers, low, strict=True)):
                assert not one.tried(recipe.deployment(numbers)).holds, f"{recipe} {numbers} below {low}"


def test_the_bound_leaves_out_the_requests_that_may_be_late() -> None:
    """Forty equal prompts at once: half of the workers finish half of them in time."""
    schedule = list(poisson([RequestClass("a", 1.0, (400, 400), (4, 4))], seed=3, count=40, rate=0.0))
    needs, recipe = demand(schedule, 16, has_cache=True), of_laptops(Slo(ttft_s=5.0), budgets=(512,))[0]
    lows = [recipe.least(needs, Slo(ttft_s=5.0), percentile) for percentile in (50.0, 95.0)]
    assert SloTarget(schedule, Slo(ttft_s=5.0), 50.0, 3).tried(recipe.deployment((3,))).holds
    assert lows == [(3,), (5,)]


def test_the_bound_of_a_busy_workload_is_close() -> None:
    """60 prompts of 2,500 tokens per second ask for more than a hundred laptops."""
    schedule = list(poisson([RequestClass("long", 1.0, (2500, 2500), (4, 4))], seed=1, count=200, rate=60.0))
    slo = Slo(ttft_s=6.0)
    (bound,) = of_laptops(slo)[0].least(demand(schedule, 16, has_cache=True), slo, 90.0)
    assert int(bound) > 50


def test_shared_beginnings_are_needed_once() -> None:
    schedule = mix(seed=1, count=3, rate=1.0)
    twice = [*schedule, *(replace(scheduled, due_s=scheduled.due_s + 10) for scheduled in schedule)]
    once, cached = demand(schedule, 16, has_cache=True), demand(twice, 16, has_cache=True)
    plain = demand(twice, 16, has_cache=False)
    assert plain.prefill.num_prefill_tokens == 2 * once.prefill.num_prefill_tokens
    assert once.prefill.num_prefill_tokens < cached.prefill.num_prefill_tokens
    assert cached.prefill.num_prefill_tokens <= once.prefill.num_prefill_tokens + 3 * 16
    assert plain.decode.num_decode_seqs == 2 * once.decode.num_decode_seqs
    with pytest.raises(ValueError, match="no request"):
        demand([], 16, has_cache=True)


def test_what_no_number_of_workers_mends_is_not_tried() -> None:
    slo = Slo(itl_s=0.015)
    _, plan = planned(slo_target(slo, rate=0.5), of_laptops(slo, degrees=(1, 4)))
    assert plan.winner is None and plan.runner_up is None and not plan.tried
    reasons = {never.reason for never in plan.never}
    assert "cannot be cut into 4" in reasons
    assert any("tokens of" in reason and "even alone" in reason for reason in reasons)
    text = format_plan(plan, slo_target(slo, rate=0.5))
    assert "Nothing that was tried holds ITL 15 ms" in text and "cannot be cut into 4" in text


def test_another_seed_adds_no_more_than_there_may_be() -> None:
    slo = Slo(ttft_s=1000.0)
    one, never = slo_target(slo, 1.0, count=20), slo_target(Slo(ttft_s=1e-9), 1.0, count=20, seed=4)
    needs = demand(one.requests, 16, has_cache=True)
    for max_gpus, num_added in ((2, 0), (3, 1), (9, 2)):
        planner = CapacityPlanner(one, never, needs, max_gpus, lambda _: None)
        (recipe,) = (r for r in of_laptops(slo, budgets=(512,)) if r.kind == "split")
        found = planner.find([recipe]).best["split"]
        assert not found.is_confirmed and found.num_added == num_added
        assert found.first.deployment == found.second.deployment == found.deployment
        assert [verdict.deployment.num_gpus for verdict in found.fewer] == list(range(2, 2 + num_added))
        text = format_plan(planner.plan, one)
        assert text.count("one seed: TTFT") == num_added
        assert found.deployment.num_gpus <= max_gpus


def test_where_nothing_holds_the_nearest_is_reported() -> None:
    slo = Slo(ttft_s=0.45)
    one = SloTarget(mix(3, 40, 0.05), slo, 60.0, 3)
    planner = CapacityPlanner(one, one, demand(one.requests, 16, has_cache=True), 1, lambda _: None)
    strict = [replace(recipe, budget=64) for recipe in of_laptops(slo) if recipe.kind == "mixed"]
    plan = planner.find(strict)
    assert plan.winner is None
    assert "Nothing that was tried holds TTFT 450 ms" in format_plan(plan, one)


def test_a_run_that_must_miss_is_aborted_and_reports_why() -> None:
    slo = Slo(ttft_s=1.0, itl_s=0.5)
    one = slo_target(slo, rate=20.0, count=200)
    verdict = one.tried(of_laptops(slo)[0].deployment((1,)))
    assert not verdict.holds and verdict.report is None and verdict.margin is None
    (miss, *_) = verdict.misses
    assert miss.measure == "TTFT" and miss.share > 0.1 and miss.target_s == 1.0


def test_a_request_that_is_refused_counts_as_never_answered() -> None:
    slo = Slo(itl_s=100.0)
    config = replace(CONFIG, gateway=replace(CONFIG.gateway, max_queued=1))
    one = SloTarget(mix(3, 40, 0.0), slo, 90.0, 3)
    (recipe, *_) = recipes(Laptop(), (1,), (64,), replace(config, engine=EngineConfig(max_num_seqs=1)), slo)
    tiny = replace(recipe, config=replace(config, engine=replace(config.engine, max_num_seqs=1, max_model_len=70)))
    verdict = one.tried(tiny.deployment((1,)))
    assert not verdict.holds and any(miss.target_s is None for miss in verdict.misses)


def test_requests_that_no_worker_accepts_are_not_called_late() -> None:
    """More workers would not help, so the plan names the error and no latency."""
    slo = Slo(ttft_s=100.0)
    one, (recipe, *_) = slo_target(slo, rate=1.0, count=20), of_laptops(slo)
    short = replace(recipe, config=replace(CONFIG, engine=replace(CONFIG.engine, max_model_len=70)))
    planner = CapacityPlanner(one, one, demand(one.requests, 16, has_cache=True), 1, lambda _: None)
    text = format_plan(planner.find([short]), one)
    assert "not served (context_length_exceeded)" in text and "too long" not in text


def test_lengthened_prompts_share_what_they_shared() -> None:
    (scheduled,) = mix(seed=1, count=1, rate=1.0)
    prompt = scheduled.request.prompt_tokens
    other = replace(
        scheduled, request=replace(scheduled.request, prompt_tokens=prompt[:32] + tuple(t + 1 for t in prompt[32:]))
    )
    for factor in (0.5, 2.0, 3.3):
        a, b = lengthened(scheduled, factor).request.prompt_tokens, lengthened(other, factor).request.prompt_tokens
        assert len(a) == max(1, round(len(prompt) * factor))
        shared = next(index for index, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        assert shared == pytest.approx(32 * factor, abs=1)
    assert lengthened(scheduled, 1.0).request.prompt_tokens == prompt


def test_a_follow_up_is_lengthened_too() -> None:
    (scheduled, answer) = mix(seed=1, count=2, rate=1.0)
    talk = replace(scheduled, follow=lambda tokens, ended_s: replace(answer, due_s=ended_s + 1))
    follow = lengthened(talk, 2.0).follow
    assert follow is not None
    later: ScheduledRequest = follow((), 5.0)
    assert len(later.request.prompt_tokens) == 2 * len(answer.request.prompt_tokens) and later.due_s == 6.0


def test_points_along_an_axis_are_plans_of_their_own() -> None:
    slo = Slo(ttft_s=9.0, itl_s=0.3)
    one = slo_target(slo, rate=0.8, count=20)
    _, plan = planned(one, of_laptops(slo, budgets=(512,)), max_gpus=6)
    assert set(plan.best) == {"mixed", "split"}
    points = along("load", one, plan.best, 6, lambda _: None)
    assert [point.factor for point in points] == sorted(point.factor for point in points)
    for kind in ("mixed", "split"):
        costs = [point.costs[kind] for point in points]  # type: ignore[index]
        known = [cost for cost in costs if cost is not None]
        assert known == sorted(known), "more load never costs less"
        assert None not in costs[: len(known)], "what holds at a load holds below it"
    for a, b in changes(points):
        assert a.cheaper != b.cheaper
    assert "load" in break_even("load", points)
