"""Implement `tandem plan`: find the cheapest cluster that meets an SLO, by simulation, and explain the choice."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from itertools import islice
from typing import Any

from tandem.cli import simulate_setup
from tandem.cli.progress_bar import ProgressBar
from tandem.core.clock import SystemClock
from tandem.core.device_defaults import with_device_defaults
from tandem.core.errors import invalid_request
from tandem.core.settings import DEFAULT_LAYER, Resolved
from tandem.core.slo import Slo, parse_slo
from tandem.sim.machines.machine import Machine
from tandem.sim.planner import plan_table
from tandem.sim.planner.break_even import AXES, BreakEvenPoint, along
from tandem.sim.planner.capacity_planner import CapacityPlanner, Found, Plan
from tandem.sim.planner.deployment_kind import DeploymentKind, recipes
from tandem.sim.planner.slo_check import SloResult, SloTarget
from tandem.sim.planner.workload_demand import demand
from tandem.sim.report import table
from tandem.sim.simulate import rare_garbage_collection

_SEARCHED = {
    "engine.max_num_batched_tokens": "set the step budgets to try with --budgets",
    "engine.kv_cache_memory": "KV gets the memory that the weights leave",
    "slo.itl_ms": "set the targets with --slo; steps are paced to them if that helps",
}
Curves = dict[str, list[BreakEvenPoint]]
"""The points of each axis of --break-even."""
CONFIRMATION_SEED, CONFIRMATION_TIMES = 1, 2
"""For the run that confirms a result: what is added to the seed, and the factor by which it has more requests."""


def run(resolved: Resolved, args: argparse.Namespace) -> int:
    """Search for the cheapest cluster that meets the SLO and print it; returns the exit code 0, or 1 if none meets it.

    Raises TandemError(INVALID_REQUEST) for invalid flags."""
    _refuse_searched(resolved)
    target, confirmation = _targets(args)
    machines, resolved = simulate_setup.machines(resolved, args)
    axes, path = _axes(args.break_even), simulate_setup.writable("--json", args.json)
    chart = simulate_setup.chart_path(args)
    kinds = _recipes(resolved, args, machines, target.slo)
    clock = SystemClock()
    began = clock.now()
    with ProgressBar(clock, None, "clusters simulated") as bar, rare_garbage_collection():
        planner = _planner(target, confirmation, args.max_gpus, resolved, bar)
        plan = planner.find(kinds)
        curves = _curves(axes, target, plan, args.max_gpus, bar)
    _print(args, plan, target, machines, curves)
    print(f"\n{len(plan.tried)} clusters simulated in {clock.now() - began:.0f} s")  # noqa: T201
    if path is not None:
        simulate_setup.write_json(path, _document(args, plan, target, machines, curves))
    if chart is not None:
        import_module("tandem.sim.planner.plan_chart").render_plan(chart, args.workload, plan, curves)
    return 0 if plan.winner is not None else 1


def _refuse_searched(resolved: Resolved) -> None:
    for key, instead in _SEARCHED.items():
        if resolved.origins[key] != DEFAULT_LAYER:
            raise invalid_request(f"{key} (from {resolved.origins[key]}) cannot be set for a plan: {instead}")


def _targets(args: argparse.Namespace) -> tuple[SloTarget, SloTarget]:
    """Return the target of the search and that of the confirming run, which has other or more requests.

    A mix is confirmed with another seed. A trace has no seed, so a longer part of it confirms.
    """
    slo, count = parse_slo(args.slo), simulate_setup.count_of(args)
    if slo == Slo():
        raise invalid_request("--slo is missing: name one or both targets, as in --slo ttft=500ms,itl=40ms")
    if not 0 < args.percentile < 100:
        raise invalid_request(f"--percentile {args.percentile:g} must lie between 0 and 100")
    if args.max_gpus < 1:
        raise invalid_request(f"--max-gpus {args.max_gpus} must be at least 1")
    more = None if count is None else count * CONFIRMATION_TIMES
    first = list(simulate_setup.workload_requests(args, count, args.seed))
    if not first:
        raise invalid_request(f"--workload {args.workload} has no requests: name another file, or a built-in mix")
    # A trace may have fewer requests than that.
    second = list(islice(simulate_setup.workload_requests(args, None, args.seed + CONFIRMATION_SEED), more))
    return (
        SloTarget(first, slo, args.percentile, args.seed),
        SloTarget(second, slo, args.percentile, args.seed + CONFIRMATION_SEED),
    )


def _recipes(
    resolved: Resolved, args: argparse.Namespace, machines: Sequence[Machine], slo: Slo
) -> list[DeploymentKind]:
    degrees, budgets = _numbers("--tp", args.tp), _numbers("--budgets", args.budgets)
    link = simulate_setup.link_bandwidth(args)
    if len(machines) > 1 and not all(machine.price_per_hour for machine in machines):
        raise invalid_request(
            "--hardware names several kinds, which are compared by price: --price must be more than 0"
        )
    return [r for m in machines for r in recipes(m, degrees, budgets, resolved.config, slo, link)]


def _planner(
    target: SloTarget, confirmation: SloTarget, max_gpus: int, resolved: Resolved, bar: ProgressBar
) -> CapacityPlanner:
    engine = with_device_defaults(resolved.config).engine
    needs = demand(target.requests, engine.block_size, has_cache=engine.enable_prefix_caching)
    planner = CapacityPlanner(
        target, confirmation, needs, max_gpus, lambda text: bar.update(len(planner.plan.tried), lambda: text)
    )
    return planner


def _curves(axes: Sequence[str], target: SloTarget, plan: Plan, max_gpus: int, bar: ProgressBar) -> Curves:
    if len(plan.best) < 2:
        return {}
    num_tried = len(plan.tried)
    return {
        axis: along(axis, target, plan.best, max_gpus, lambda text: bar.update(num_tried, lambda: text))
        for axis in axes
    }


def _print(
    args: argparse.Namespace, plan: Plan, target: SloTarget, machines: Sequence[Machine], curves: Curves
) -> None:
    rate = f" at {args.rate:g} requests/s" if args.rate is not None else ""
    model = args.shape if args.profile is None else args.profile
    print(f"{model}, {len(target.requests):,} requests of {args.workload}{rate}, seed {args.seed}\n")  # noqa: T201
    print(plan_table.format_plan(plan, target))  # noqa: T201
    if curves:
        print(f"\n{plan_table.break_evens(curves)}")  # noqa: T201
    for machine in machines:
        print(f"\n{table.facts(machine.about)}")  # noqa: T201


def _axes(text: str) -> tuple[str, ...]:
    axes = {axis: axis for axis in AXES}
    return tuple(simulate_setup.known("--break-even", axis, axes) for axis in filter(None, text.split(",")))


def _numbers(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise invalid_request(f"{flag} {text} must be a comma-separated list of numbers from 1 on")
    return sorted({int(part) for part in parts})


def _document(
    args: argparse.Namespace, plan: Plan, target: SloTarget, machines: Sequence[Machine], curves: Curves
) -> dict[str, Any]:
    """Return the content of the `--json` file."""
    winner, runner_up = plan.winner, plan.runner_up
    return {
        "workload": simulate_setup.workload_document(args),
        "slo": asdict(target.slo),
        "percentile": target.percentile,
        "winner": None if winner is None else _found(winner),
        "runner_up": None if runner_up is None else _found(runner_up),
        "tried": [
            {"recipe": str(r), "numbers": n, "cost": r.cost(n), **_verdict(verdict)}
            for (r, n), verdict in plan.tried.items()
        ],
        "never": [{"recipe": str(never.recipe), "reason": never.reason} for never in plan.never],
        "break_even": {
            axis: [{"factor": p.factor, **p.costs, "cheaper": p.cheaper} for p in points]
            for axis, points in curves.items()
        },
        "machines": {machine.name: dict(machine.about) for machine in machines},
    }


def _found(found: Found) -> dict[str, Any]:
    return {
        "kind": found.recipe.kind,
        "recipe": str(found.recipe),
        "pools": [asdict(pool) for pool in found.deployment.pools],
        "budget": found.recipe.budget,
        "itl_ms": found.recipe.itl_ms,
        "num_gpus": found.deployment.num_gpus,
        "cost_per_hour": found.cost,
        "is_confirmed": found.is_confirmed,
        "num_added": found.num_added,
        "first": _verdict(found.first),
        "second": _verdict(found.second),
    }


def _verdict(verdict: SloResult) -> dict[str, Any]:
    return {
        "holds": verdict.holds,
        "margin": verdict.margin,
        "ttft_s": verdict.ttft_s,
        "itl_s": verdict.itl_s,
        "misses": [asdict(miss) for miss in verdict.misses],
    }
