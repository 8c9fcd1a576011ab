"""Convert settings to latency targets and to bounds of pools."""

from __future__ import annotations

from tandem.core.config import PlannerConfig, SloConfig
from tandem.core.slo import Slo


def targets_of(slo: SloConfig) -> Slo:
    """Return the latency targets of the interactive lane, which the planner scales for.

    A setting of 0 means no target."""
    return Slo.of_ms(slo.ttft_ms or None, slo.itl_ms or None)


def most_of(planner: PlannerConfig) -> dict[str, int]:
    """Return the largest number of workers of each pool that has a bound, by the role of the pool.

    A pool without a bound is missing. The result is empty unless `planner.change_roles` is set, because the bounds are
    used only to choose workers that return to the role of their pool, which is a role change."""
    most = {"prefill": planner.max_prefill, "decode": planner.max_decode} if planner.change_roles else {}
    return {pool: number for pool, number in most.items() if number}
