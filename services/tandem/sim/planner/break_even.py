"""Find where the cheaper kind of deployment, mixed or split, changes when one property of the workload or link is
scaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tandem.core.device_defaults import with_device_defaults
from tandem.sim.planner.capacity_planner import CapacityPlanner, Found
from tandem.sim.planner.deployment_kind import DeploymentKind, Kind
from tandem.sim.planner.slo_check import SloTarget
from tandem.sim.planner.workload_demand import demand
from tandem.workload.scheduled_request import ScheduledRequest

AXES = ("prompt", "load", "link")
FACTORS = (0.25, 1.0, 4.0)
NUM_HALVINGS = 2


@dataclass(frozen=True, slots=True)
class BreakEvenPoint:
    """Costs of the cheapest mixed and the cheapest split deployment when one property of the workload or link is scaled
    by `factor`.

    `costs`: cost by kind, in the unit of `DeploymentKind.cost`; None where no number of workers meets the targets.
    """

    factor: float
    costs: Mapping[Kind, float | None]

    @property
    def cheaper(self) -> Kind | None:
        """Return the cheaper kind of deployment: mixed when costs are equal, None when neither meets the targets."""
        mixed, split = self.costs["mixed"], self.costs["split"]
        if mixed is None and split is None:
            return None
        if split is None or (mixed is not None and mixed <= split):
            return "mixed"
        return "split"


def along(
    axis: str, slo_target: SloTarget, found: Mapping[Kind, Found], max_gpus: int, on_progress: Callable[[str], None]
) -> list[BreakEvenPoint]:
    """Return the costs of both kinds of deployment at several factors of one property, in ascending order of the
    factors.

    The first factors are `FACTORS`. Then, `NUM_HALVINGS` times, a factor is inserted between every two neighbours
    between which the cheaper kind changes.

    `axis`: the property to scale, one of `AXES`. `slo_target`: the workload and the targets with factor 1. `found`: the
    best deployment of each kind with factor 1; each kind keeps its recipe, and only its numbers of workers are searched
    again, with at most `max_gpus` accelerators. `on_progress`: called with a text before each simulation. Raises
    KeyError unless `found` has both kinds.
    """

    def point(factor: float) -> BreakEvenPoint:
        changed = _changed(axis, factor, slo_target)
        costs: dict[Kind, float | None] = {}
        for kind, best in found.items():
            recipe = _relinked(best.recipe, factor) if axis == "link" else best.recipe
            engine = with_device_defaults(recipe.config).engine
            needs = demand(changed.requests, engine.block_size, has_cache=engine.enable_prefix_caching)
            low = recipe.least(needs, changed.slo, changed.percentile)
            costs[kind] = None
            if not isinstance(low, str):
                planner = CapacityPlanner(
                    changed, changed, needs, max_gpus, lambda text: on_progress(f"{axis} x {factor:.3g}: {text}")
                )
                numbers = planner.cheapest(recipe, low)
                costs[kind] = None if numbers is None else recipe.cost(numbers)
        return BreakEvenPoint(factor, costs)

    points = {factor: point(factor) for factor in FACTORS}
    for _ in range(NUM_HALVINGS):
        ordered = sorted(points)
        for low, high in pairwise(ordered):
            if points[low].cheaper != points[high].cheaper:
                middle = math.sqrt(low * high)
                points[middle] = point(middle)
    return [points[factor] for factor in sorted(points)]


def changes(points: Sequence[BreakEvenPoint]) -> list[tuple[BreakEvenPoint, BreakEvenPoint]]:
    """Return the pairs of adjacent points between which the cheaper kind of deployment changes."""
    return [(a, b) for a, b in pairwise(points) if a.cheaper != b.cheaper]


def lengthened(scheduled: ScheduledRequest, factor: float) -> ScheduledRequest:
    """Return the request with a prompt `factor` times as long.

    A prefix that prompts share is lengthened in the same way, so it stays shared.
    """
    prompt = scheduled.request.prompt_tokens
    number = max(1, round(len(prompt) * factor))
    longer = tuple(prompt[min(len(prompt) - 1, int(index / factor))] for index in range(number))
    follow = scheduled.follow
    return replace(
        scheduled,
        request=replace(scheduled.request, prompt_tokens=longer),
        follow=None if follow is None else lambda answer, ended_s: lengthened(follow(answer, ended_s), factor),
    )


def _changed(axis: str, factor: float, slo_target: SloTarget) -> SloTarget:
    requests = slo_target.requests
    if axis == "prompt":
        requests = [lengthened(scheduled, factor) for scheduled in requests]
    elif axis == "load":
        requests = [replace(scheduled, due_s=scheduled.due_s / factor) for scheduled in requests]
    return replace(slo_target, requests=requests)


def _relinked(recipe: DeploymentKind, factor: float) -> DeploymentKind:
    """Return a recipe with links `factor` times as fast."""
    worker = recipe.machine.worker("decode", recipe.degrees[-1], recipe.config)
    bandwidth = recipe.link_bandwidth or worker.bandwidth / recipe.degrees[-1]
    return replace(recipe, link_bandwidth=bandwidth * factor)
