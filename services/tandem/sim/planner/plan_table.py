"""Format the result of a search for the cheapest deployment as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from tandem.sim.planner.break_even import BreakEvenPoint, changes
from tandem.sim.planner.capacity_planner import MOST_TIMES, Found, Plan
from tandem.sim.planner.deployment_kind import DeploymentKind, Kind
from tandem.sim.planner.slo_check import Miss, SloResult, SloTarget
from tandem.sim.report.table import grid, time

LONG_ENOUGH = 10
"""How many times the 95th percentile of the end-to-end latency a run should last."""
_NAMES: dict[Kind, str] = {"mixed": "mixed workers", "split": "prefill and decode apart"}


def format_plan(plan: Plan, slo_target: SloTarget) -> str:
    """Return a plan as paragraphs of text: the cheapest deployment, the figures of the best deployment of each kind,
    the deployments that missed a target, and the recipes that were ruled out without simulation."""
    parts = [_answer(plan, slo_target), _finalists(plan), _fewer(plan), _impossible(plan)]
    return "\n\n".join(part for part in parts if part)


def break_even(axis: str, points: Sequence[BreakEvenPoint]) -> str:
    """Return a text for one scaled property, `axis`: a table with a line for each of `points`, and the factors between
    which the cheaper kind of deployment changes."""
    rows = [(axis, "mixed", "split", "cheaper")]
    rows += [(f"x {p.factor:.3g}", _cost(p.costs["mixed"]), _cost(p.costs["split"]), p.cheaper or "-") for p in points]
    found = [
        f"{a.cheaper or 'neither'} up to x {a.factor:.3g}, {b.cheaper or 'neither'} from x {b.factor:.3g}"
        for a, b in changes(points)
    ]
    where = f"what holds for less changes: {'; '.join(found)}" if found else "the cheaper kind does not change"
    return f"{grid(rows)}\n{where}"


def _answer(plan: Plan, slo_target: SloTarget) -> str:
    winner, other = plan.winner, plan.runner_up
    requirement = f"{slo_target.slo} for {slo_target.percentile:g} % of every class"
    if winner is None:
        return f"Nothing that was tried holds {requirement}.{_nearest(plan)}"
    lines = [f"{_described(winner)} hold {requirement}."]
    if other is None:
        rest: Kind = "split" if winner.recipe.kind == "mixed" else "mixed"
        most = f" for up to {MOST_TIMES} times as much" if rest == "split" else ""
        lines.append(f"With {_NAMES[rest]} nothing that was tried does{most}.")
    elif winner.recipe.kind == "mixed":
        lines.append(f"Disaggregation does NOT pay here: {_against(winner, other)}.")
    else:
        lines.append(f"Disaggregation pays here: {_against(winner, other)}.")
    lines += [_unconfirmed(found) for found in (winner, other) if found is not None and not found.is_confirmed]
    return "\n".join(lines + _short(winner))


def _described(found: Found) -> str:
    return f"{found.deployment}, budget {found.recipe.budget}{_paced(found.recipe)}, at {found.cost:.2f} per hour"


def _against(winner: Found, other: Found) -> str:
    if other.cost == winner.cost:
        return f"{other.deployment} cost the same and have more parts"
    return f"{other.deployment} cost {other.cost:.2f}, {other.cost / winner.cost - 1:+.0%}"


def _unconfirmed(found: Found) -> str:
    seed, missed = ("the first", found.first) if found.second.holds else ("another", found.second)
    return f"With {seed} seed {found.deployment} do not hold: {_missed(missed.misses)}."


def _short(winner: Found) -> list[str]:
    """Return a warning when the run was too short: a cluster begins empty and reaches its steady load only after the
    time of several requests."""
    report = winner.second.report
    whole = None if report is None else report.groups[0].e2e
    if report is None or whole is None or report.wall_s >= LONG_ENOUGH * whole.p95:
        return []
    times = report.wall_s / whole.p95
    return [f"The run lasts only {times:.1f} times as long as a long answer ({time(whole.p95)}): raise --count."]


def _nearest(plan: Plan) -> str:
    nearest = plan.nearest
    if nearest is None or nearest.margin is None:
        return " No run came near enough to be finished."
    return f" Nearest: {nearest.deployment}, {nearest.margin:.2f} times the target ({_missed(nearest.misses)})."


def _finalists(plan: Plan) -> str:
    rows = [("", "per hour", "GPUs", "TTFT", "ITL", "other seed: TTFT", "ITL", "goodput", "budget")]
    for found in (plan.winner, plan.runner_up):
        if found is not None:
            good = found.second.report.good_share if found.second.report is not None else None
            rows.append((
                f"  {found.deployment}",
                f"{found.cost:.2f}",
                str(found.deployment.num_gpus),
                time(found.first.ttft_s),
                time(found.first.itl_s),
                time(found.second.ttft_s),
                time(found.second.itl_s),
                "-" if good is None else f"{good:.1%}",
                f"{found.recipe.budget}{_paced(found.recipe)}",
            ))  # fmt: skip
    return f"At the percentile, worst class:\n{grid(rows)}" if len(rows) > 1 else ""


def _fewer(plan: Plan) -> str:
    """Return the largest failed deployment of each recipe, and those that failed with one of two seeds, with the
    targets that they missed."""
    failed: dict[DeploymentKind, tuple[int, SloResult]] = {}
    for (recipe, _), verdict in plan.tried.items():
        size = verdict.deployment.num_gpus
        if not verdict.holds and size >= failed.get(recipe, (0, verdict))[0]:
            failed[recipe] = (size, verdict)
    rows = [
        (f"  {verdict.deployment}", f"budget {recipe.budget}{_paced(recipe)}", _missed(verdict.misses))
        for recipe, (_, verdict) in failed.items()
    ]
    for found in filter(None, (plan.winner, plan.runner_up)):
        how = f"budget {found.recipe.budget}{_paced(found.recipe)}"
        rows += [(f"  {verdict.deployment}", how, f"one seed: {_missed(verdict.misses)}") for verdict in found.fewer]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    lines = [f"{what:<{widths[0]}}  {how:<{widths[1]}}  {why}" for what, how, why in rows]
    return "\n".join(["What missed the targets:", *lines]) if lines else ""


def _impossible(plan: Plan) -> str:
    reasons: dict[str, list[str]] = {}
    for never in plan.never:
        degrees = "+".join(map(str, never.recipe.degrees))
        reasons.setdefault(never.reason, []).append(f"{never.recipe.machine.name} {never.recipe.kind} tp {degrees}")
    lines = [
        textwrap.fill(
            f"{reason}: {', '.join(dict.fromkeys(names))}", 116, initial_indent="  ", subsequent_indent="    "
        )
        for reason, names in reasons.items()
    ]
    return "Never:\n" + "\n".join(lines) if lines else ""


def _missed(misses: Sequence[Miss]) -> str:
    return ", ".join(_miss(miss) for miss in misses) or "nothing missed"


def _miss(miss: Miss) -> str:
    if miss.target_s is None:
        return f"{miss.share:.1%} of {miss.group} not served ({miss.errors})"
    if miss.value_s is None:
        return f"{miss.measure} of {miss.group} too long for {miss.share:.0%} when it was given up"
    return f"{miss.measure} of {miss.group} {time(miss.value_s)} ({miss.share:.1%} too long)"


def _paced(recipe: DeploymentKind) -> str:
    return f", paced to {recipe.itl_ms:g} ms" if recipe.itl_ms else ""


def _cost(cost: float | None) -> str:
    return "none holds" if cost is None else f"{cost:.2f}"


def break_evens(found: Mapping[str, Sequence[BreakEvenPoint]]) -> str:
    return "\n\n".join(break_even(axis, points) for axis, points in found.items())
