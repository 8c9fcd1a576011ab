"""Find the cheapest deployment of each kind that meets latency targets, by lower bounds and then simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tandem.sim.machines.deployment import Deployment
from tandem.sim.planner.deployment_kind import DeploymentKind, Kind
from tandem.sim.planner.slo_check import SloResult, SloTarget
from tandem.sim.planner.workload_demand import WorkloadDemand

KINDS: tuple[Kind, ...] = ("mixed", "split")
MOST_REPAIRS = 2
MOST_TIMES = 4
"""The kind that is searched second may cost at most so many times as much as the first; beyond that the search stops,
because the answer would not change a decision."""


@dataclass(frozen=True, slots=True)
class Found:
    """The cheapest deployment of one kind, found in a simulation and tested in a second one.

    `recipe`: the deployment without its numbers of workers. `numbers`: the number of workers of each pool. `first`:
    result with the first seed. `second`: result with another seed and more requests. `fewer`: results of smaller
    deployments that missed a target with one of the two seeds; after each of them, one worker was added. `is_confirmed`
    is False if up to `MOST_REPAIRS` added workers were not enough."""

    recipe: DeploymentKind
    numbers: tuple[int, ...]
    first: SloResult
    second: SloResult
    fewer: tuple[SloResult, ...] = ()

    @property
    def deployment(self) -> Deployment:
        return self.recipe.deployment(self.numbers)

    @property
    def cost(self) -> float:
        return self.recipe.cost(self.numbers)

    @property
    def is_confirmed(self) -> bool:
        return self.first.holds and self.second.holds

    @property
    def num_added(self) -> int:
        """Return the number of workers that were added after the search, because one of the two simulations missed a
        target."""
        return len(self.fewer)


@dataclass(frozen=True, slots=True)
class Never:
    """A recipe (`DeploymentKind`) that was ruled out without simulation: no number of workers, or none with the allowed
    accelerators, meets the targets. `reason` is a text for people."""

    recipe: DeploymentKind
    reason: str


@dataclass(slots=True)
class Plan:
    """Result of a search for the cheapest deployments.

    `best`: for each kind, "mixed" or "split", its cheapest deployment that meets the targets; a kind without one is
    left out. `tried`: the result of each simulation with the first seed, by recipe and numbers of workers, in order.
    `never`: the recipes that were ruled out without simulation.
    """

    best: dict[Kind, Found] = field(default_factory=dict)
    tried: dict[tuple[DeploymentKind, tuple[int, ...]], SloResult] = field(default_factory=dict)
    never: list[Never] = field(default_factory=list)

    @property
    def winner(self) -> Found | None:
        """Return the cheaper deployment in `best`; None when `best` is empty.

        A deployment that met the targets in both of its simulations precedes one that did not, even if it costs more.
        At equal costs the mixed one is chosen.
        """
        return min(
            self.best.values(), key=lambda f: (not f.is_confirmed, f.cost, KINDS.index(f.recipe.kind)), default=None
        )

    @property
    def runner_up(self) -> Found | None:
        """Return the deployment in `best` that is not the winner: the split one if the winner is mixed, or the reverse.

        None when `best` has fewer than two.
        """
        winner = self.winner
        return next((f for f in self.best.values() if winner is not None and f.recipe.kind != winner.recipe.kind), None)

    @property
    def nearest(self) -> SloResult | None:
        """Return the simulation result that is closest to meeting the targets, or that meets them best.

        For each simulation that ran to its end, the largest ratio of a percentile to its target is taken; the result
        with the least of these is returned. None when no simulation ran to its end.
        """
        whole = [verdict for verdict in self.tried.values() if verdict.margin is not None]
        return min(whole, key=lambda verdict: verdict.margin or 0.0, default=None)


@dataclass(slots=True, eq=False)
class CapacityPlanner:
    """Search for the cheapest numbers of workers by simulation and keep every result in `plan`.

    `slo_target`: the workload and the targets. `demand`: the demand of that workload. `confirmation`: the same targets
    with another seed and more requests. `max_gpus`: the most accelerators of a deployment. `on_progress`: called with a
    text before each simulation."""

    slo_target: SloTarget
    confirmation: SloTarget
    demand: WorkloadDemand
    max_gpus: int
    on_progress: Callable[[str], None]
    plan: Plan = field(default_factory=Plan, init=False)

    def find(self, recipes: Iterable[DeploymentKind]) -> Plan:
        """Search all recipes and return the plan with the best deployment of each kind, mixed and split.

        Recipes with lower cost bounds are tried first, so that recipes that cost more than the best known one need no
        simulation.
        """
        bounded = self._bounded(recipes)
        other = math.inf
        for kind in KINDS:
            known: tuple[DeploymentKind, tuple[int, ...]] | None = None
            below = MOST_TIMES * other
            for recipe, low in bounded:
                numbers = self.cheapest(recipe, low, below) if recipe.kind == kind else None
                if numbers is not None:
                    known, below = (recipe, numbers), recipe.cost(numbers)
            if known is not None:
                self.plan.best[kind] = self._confirmed(*known)
                other = self.plan.best[kind].cost
        return self.plan

    def cheapest(self, recipe: DeploymentKind, low: tuple[int, ...], below: float = math.inf) -> tuple[int, ...] | None:
        """Return the numbers of workers with which a recipe meets the targets at the least cost.

        Returns None when no numbers of workers with at most `max_gpus` accelerators and a cost less than `below` meet
        the targets. `low`: lower bound of each pool's number of workers. `below`: a cost, in the unit of
        `DeploymentKind.cost`.
        """
        limit = min(self.max_gpus * recipe.prices[0] / recipe.degrees[0], below * (1 - 1e-9))
        if recipe.cost(low) > limit:
            return None
        if recipe.kind == "mixed":
            high = int(limit / recipe.prices[0] + 1e-9)
            number = least(low[0], high, lambda n: self._try(recipe, (n,)).holds)
            return None if number is None else (number,)
        return cheapest_pair(
            (low[0], low[1]), (recipe.prices[0], recipe.prices[1]), limit, lambda p, d: self._try(recipe, (p, d)).holds
        )

    # ---- inside

    def _bounded(self, recipes: Iterable[DeploymentKind]) -> list[tuple[DeploymentKind, tuple[int, ...]]]:
        found: list[tuple[DeploymentKind, tuple[int, ...]]] = []
        for recipe in recipes:
            low = recipe.least(self.demand, self.slo_target.slo, self.slo_target.percentile)
            if isinstance(low, str):
                self.plan.never.append(Never(recipe, low))
            elif recipe.num_gpus(low) > self.max_gpus:
                self.plan.never.append(Never(recipe, f"takes more than {self.max_gpus} accelerators"))
            else:
                found.append((recipe, low))
        return sorted(found, key=lambda one: one[0].cost(one[1]))

    def _try(self, recipe: DeploymentKind, numbers: tuple[int, ...]) -> SloResult:
        key = (recipe, numbers)
        if key not in self.plan.tried:
            deployment = recipe.deployment(numbers)
            self.on_progress(str(deployment) + f", budget {recipe.budget}" + (", paced" if recipe.itl_ms else ""))
            self.plan.tried[key] = self.slo_target.tried(deployment)
        return self.plan.tried[key]

    def _confirmed(self, recipe: DeploymentKind, numbers: tuple[int, ...]) -> Found:
        """Repeat the run with another seed, and add up to `MOST_REPAIRS` workers while one run misses a target."""
        fewer: list[SloResult] = []
        while True:
            first = self._try(recipe, numbers)
            self.on_progress(f"{recipe.deployment(numbers)} with another seed")
            second = self.confirmation.tried(recipe.deployment(numbers))
            found = Found(recipe, numbers, first, second, tuple(fewer))
            missed = first if second.holds else second
            more = _one_more(recipe, numbers, missed)
            if found.is_confirmed or len(fewer) == MOST_REPAIRS or recipe.num_gpus(more) > self.max_gpus:
                return found
            fewer.append(missed)
            numbers = more


def _one_more(recipe: DeploymentKind, numbers: Sequence[int], verdict: SloResult) -> tuple[int, ...]:
    """Return the numbers with one worker more; in a split deployment, in the pool whose target was missed."""
    if recipe.kind == "mixed":
        return (numbers[0] + 1,)
    is_late = any(miss.measure == "TTFT" for miss in verdict.misses)
    return (numbers[0] + is_late, numbers[1] + (not is_late))


def least(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """Return the least number in [low, high] for which `holds` is true; None when it is false for `high`.

    `holds` is assumed to stay true as the number grows. The search begins at `low` with growing strides, because a good
    lower bound is close to the result."""
    failed, stride, number = low - 1, 1, low
    while number <= high:
        if holds(number):
            return _between(failed, number, holds)
        if number == high:
            return None
        failed, number, stride = number, min(high, number + stride), 2 * stride
    return None


def cheapest_pair(
    low: tuple[int, int], price: tuple[float, float], limit: float, holds: Callable[[int, int], bool]
) -> tuple[int, int] | None:
    """Return the cheapest pair of numbers for which `holds` is true; None when there is none.

    `low`: the least value of each number. `price`: the cost per unit of the first and of the second number. `limit`:
    the most that a pair may cost. `holds` is assumed to stay true as the second number grows. At equal costs, the pair
    with the smaller first number is returned.
    """
    best: tuple[int, int] | None = None
    first = low[0]
    while True:
        most = _most(first, price, limit, best)
        if most < low[1]:
            return best
        if holds(first, most):  # so it is not tried again
            best = (first, least(low[1], most - 1, partial(holds, first)) or most)
        first += 1


def _most(first: int, price: tuple[float, float], limit: float, best: tuple[int, int] | None) -> int:
    """Return the greatest second number beside `first` that is within the limit and cheaper than the best pair."""
    if best is None:
        return int((limit - first * price[0]) / price[1] + 1e-9)
    room = best[0] * price[0] + best[1] * price[1] - first * price[0]
    return int(-(-(room / price[1] - 1e-9) // 1)) - 1


def _between(failed: int, held: int, holds: Callable[[int], bool]) -> int:
    while held - failed > 1:
        middle = (failed + held) // 2
        if holds(middle):
            held = middle
        else:
            failed = middle
    return held
