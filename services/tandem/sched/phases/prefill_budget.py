"""Compute the prefill budget of one plan and split it among prompts that run or may start."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.kv.block_pool import BlockPool
from tandem.sched.budget.prefill_sharing import prompt_of
from tandem.sched.budget.step_sizer import StepSizer
from tandem.sched.budget.step_time_model import features
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.state.sequence import Sequence


def assign_prefill_budget(
    state: SchedulerState,
    builder: PlanBuilder,
    pacer: StepSizer,
    started: Iterable[Sequence],
    startable: Iterable[Sequence],
    now: float,
) -> None:
    """Give a plan that holds its decodes the token budget of each prompt. Without chunked prefill there is no split:
    prompts are computed whole, in order."""
    targets = state.limits.targets
    itls = [targets.lane(seq.lane).itl_s for seq in state.running if seq.id in builder.slices]
    target_s = min((itl for itl in itls if itl > 0), default=0.0)
    prefill_budget = pacer.budget_for(features(builder.slices.values()), builder.budget, target_s)
    if not state.limits.enable_chunked_prefill:
        return
    prompts = [prompt_of(seq, seq.num_planned, targets, now) for seq in started]
    if builder.budget:
        prompts += [prompt_of(seq, _num_hits(seq, state.pool), targets, now) for seq in startable]
    builder.split_prefill_budget(prompts, prefill_budget)


def _num_hits(seq: Sequence, pool: BlockPool) -> int:
    """Return the length of the prefix-cache hit in tokens; the lookup continues where the last one of this sequence
    ended."""
    seq.num_hits_seen += pool.count_hits(seq.reusable(pool.block_size)[seq.num_hits_seen :])
    return seq.num_hits_seen * pool.block_size
