"""Where the cheaper kind of deployment changes along one property of workload or link; never makes a plan."""

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
from tandem.workload.ask import ScheduledRequest

AXES = ("prompt", "load", "link")
FACTORS = (0.25, 1.0, 4.0)
NUM_HALVINGS = 2


@dataclass(frozen=True, slots=True)
class BreakEvenPoint:
    """`factor` times what it is; costs per hour of the cheapest numbers of each kind's recipe, None: none holds."""

    factor: float
    costs: Mapping[Kind, float | None]

    @property
    def cheaper(self) -> Kind | None:
        """The mixed kind where costs are equal; None where neither holds."""
        mixed, split = self.costs["mixed"], self.costs["split"]
        if mixed is None and split is None:
            return None
        if split is None or (mixed is not None and mixed <= split):
            return "mixed"
        return "split"


def along(
    axis: str, promise: SloTarget, found: Mapping[Kind, Found], max_gpus: int, told: Callable[[str], None]
) -> list[BreakEvenPoint]:
    """Points in order of their factors: three, and halvings wherever the cheaper kind changes between two of them.
    Each kind keeps its recipe, only its numbers are searched again. Raises KeyError unless both kinds were found."""
    points = {factor: _point(axis, factor, promise, found, max_gpus, told) for factor in FACTORS}
    for _ in range(NUM_HALVINGS):
        ordered = sorted(points)
        for low, high in pairwise(ordered):
            if points[low].cheaper != points[high].cheaper:
                middle = math.sqrt(low * high)
                points[middle] = _point(axis, middle, promise, found, max_gpus, told)
    return [points[factor] for factor in sorted(points)]


def changes(points: Sequence[BreakEvenPoint]) -> list[tuple[BreakEvenPoint, BreakEvenPoint]]:
    """Neighbours between which the cheaper kind is another."""
    return [(a, b) for a, b in pairwise(points) if a.cheaper != b.cheaper]


def lengthened(ask: ScheduledRequest, factor: float) -> ScheduledRequest:
    """With a prompt `factor` times as long; prompts that share a beginning still share one, as many times as long."""
    prompt = ask.request.prompt_tokens
    number = max(1, round(len(prompt) * factor))
    longer = tuple(prompt[min(len(prompt) - 1, int(index / factor))] for index in range(number))
    follow = ask.follow
    return replace(
        ask,
        request=replace(ask.request, prompt_tokens=longer),
        follow=None if follow is None else lambda answer, ended_s: lengthened(follow(answer, ended_s), factor),
    )


def _point(
    axis: str,
    factor: float,
    promise: SloTarget,
    found: Mapping[Kind, Found],
    max_gpus: int,
    told: Callable[[str], None],
) -> BreakEvenPoint:
    changed = _changed(axis, factor, promise)
    costs: dict[Kind, float | None] = {}
    for kind, best in found.items():
        recipe = _relinked(best.recipe, factor) if axis == "link" else best.recipe
        engine = with_device_defaults(recipe.config).engine
        needs = demand(changed.asks, engine.block_size, has_cache=engine.enable_prefix_caching)
        low = recipe.least(needs, changed.slo, changed.percentile)
        costs[kind] = None
        if not isinstance(low, str):
            planner = CapacityPlanner(
                changed, changed, needs, max_gpus, lambda text: told(f"{axis} x {factor:.3g}: {text}")
            )
            numbers = planner.cheapest(recipe, low)
            costs[kind] = None if numbers is None else recipe.cost(numbers[1])
    return BreakEvenPoint(factor, costs)


def _changed(axis: str, factor: float, promise: SloTarget) -> SloTarget:
    if axis == "prompt":
        return replace(promise, asks=[lengthened(ask, factor) for ask in promise.asks])
    if axis == "load":
        return replace(promise, asks=[replace(ask, due_s=ask.due_s / factor) for ask in promise.asks])
    return promise


def _relinked(recipe: DeploymentKind, factor: float) -> DeploymentKind:
    """As it would be with links so many times as fast."""
    worker = recipe.machine.worker("decode", recipe.degrees[-1], recipe.config)
    bandwidth = recipe.link_bandwidth or worker.bandwidth / recipe.degrees[-1]
    return replace(recipe, link_bandwidth=bandwidth * factor)
