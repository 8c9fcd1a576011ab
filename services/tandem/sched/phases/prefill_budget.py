"""Compute the prefill budget of one plan and split it among prompts that run or may start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tandem.core.request import PrefillJob
from tandem.kv.block_pool import BlockPool
from tandem.sched.budget.prefill_sharing import prompt_of
from tandem.sched.budget.step_sizer import StepSizer
from tandem.sched.budget.step_time_model import features
from tandem.sched.state.block_needs import blocks_for
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.state.limits import may_offer
from tandem.sched.state.sequence import Sequence


def assign_prefill_budget(
    builder: PlanBuilder,
    pacer: StepSizer,
    running: Iterable[Sequence],
    started: Iterable[Sequence],
    startable: Iterable[Sequence],
    now: float,
) -> None:
    """Give a plan that holds its decodes the token budget of each prompt. Without chunked prefill there is no split:
    prompts are computed whole, in order."""
    targets = builder.limits.targets
    itls = [targets.lane(seq.lane).itl_s for seq in running if seq.id in builder.slices]
    target_s = min((itl for itl in itls if itl > 0), default=0.0)
    prefill_budget = pacer.budget_for(features(builder.slices.values()), builder.budget, target_s)
    if not builder.limits.enable_chunked_prefill:
        return
    prompts = [prompt_of(seq, seq.num_planned, targets, now) for seq in started]
    if builder.budget:
        prompts += [prompt_of(seq, _num_hits(seq, builder.pool), targets, now) for seq in startable]
    builder.split_prefill_budget(prompts, prefill_budget)


def admissible(waiting: Iterable[Sequence], pool: BlockPool, largest_reservation: int) -> Iterator[Sequence]:
    """Yield the waiting sequences that could start to compute now.

    Sequences that wait for another worker, and prefills that wait for leases to end, are left out, so that they take no
    part of the budget.
    """
    may_prefill = True
    for seq in (seq for seq in waiting if seq.may_start):
        if isinstance(seq.job, PrefillJob):
            need = blocks_for(len(seq.tokens), pool.block_size)
            may_prefill = may_prefill and may_offer(need, pool.num_leased, pool.num_blocks, largest_reservation)
        if not seq.is_pull and (may_prefill or not isinstance(seq.job, PrefillJob)):
            yield seq


def _num_hits(seq: Sequence, pool: BlockPool) -> int:
    """Return the length of the prefix-cache hit in tokens; the lookup continues where the last one of this sequence
    ended."""
    seq.num_hits_seen += pool.count_hits(seq.reusable(pool.block_size)[seq.num_hits_seen :])
    return seq.num_hits_seen * pool.block_size
