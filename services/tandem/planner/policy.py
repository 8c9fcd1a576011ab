"""Convert settings to the scaler's policy."""

from __future__ import annotations

from tandem.core.config import PlannerConfig, SloConfig
from tandem.core.slo import Slo
from tandem.scaling.policy import Bounds, ScalingPolicy


def targets_of(slo: SloConfig) -> Slo:
    """Return the latency targets of the interactive lane."""
    return Slo.of_ms(slo.ttft_ms or None, slo.itl_ms or None)


def most_of(planner: PlannerConfig) -> dict[str, int]:
    """Return the largest number of workers of each bounded pool.

    Without `change_roles` no pool is bounded here, because no worker of a full pool could be made free by a role
    change.
    """
    most = {"prefill": planner.max_prefill, "decode": planner.max_decode} if planner.change_roles else {}
    return {pool: number for pool, number in most.items() if number}


def policy_of(planner: PlannerConfig, slo: Slo) -> ScalingPolicy:
    """Build the scaling policy. Raises TandemError(INVALID_REQUEST)."""
    return ScalingPolicy(
        slo=slo,
        percentile=planner.percentile,
        headroom=planner.headroom,
        interval_s=planner.interval_s,
        window_s=planner.window_s,
        start_s=planner.start_s,
        scale_down_s=planner.scale_down_s,
        prefill=Bounds(planner.min_prefill, planner.max_prefill or None),
        decode=Bounds(planner.min_decode, planner.max_decode or None),
        change_roles=planner.change_roles,
    )
