"""Joins budget and share for one plan: what decodes left, divided among prompts that run or might start; never plans
one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tandem.core.request import PrefillJob
from tandem.kv.block_pool import BlockPool
from tandem.sched.budget.prefill_sharing import prompt_of
from tandem.sched.budget.step_sizer import StepSizer
from tandem.sched.budget.step_time_model import features
from tandem.sched.phases.job_admission import blocks_for
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.state.limits import may_offer
from tandem.sched.state.sequence import Sequence


def assign_prefill_budget(
    draft: PlanBuilder,
    pacer: StepSizer,
    running: Iterable[Sequence],
    started: Iterable[Sequence],
    startable: Iterable[Sequence],
    now: float,
) -> None:
    """Give `draft`, which holds the decodes, its shares for prompts. Without chunked prefill there are none: prompts
    are computed whole, in order."""
    targets = draft.limits.targets
    itls = [targets.lane(seq.lane).itl_s for seq in running if seq.id in draft.slices]
    target_s = min((itl for itl in itls if itl > 0), default=0.0)
    allowance = pacer.budget_for(features(draft.slices.values()), draft.budget, target_s)
    if not draft.limits.enable_chunked_prefill:
        return
    prompts = [prompt_of(seq, seq.num_planned, targets, now) for seq in started]
    if draft.budget:
        prompts += [prompt_of(seq, _num_hits(seq, draft.pool), targets, now) for seq in startable]
    draft.divide(prompts, allowance)


def admissible(waiting: Iterable[Sequence], pool: BlockPool, largest_promise: int) -> Iterator[Sequence]:
    """Those that wait to compute here, without what waits for another worker and without prefills that wait for leases:
    they must take nobody's share."""
    may_prefill = True
    for seq in (seq for seq in waiting if seq.may_start):
        if isinstance(seq.job, PrefillJob):
            need = blocks_for(len(seq.tokens), pool.block_size)
            may_prefill = may_prefill and may_offer(need, pool.num_leased, pool.num_blocks, largest_promise)
        if not seq.is_pull and (may_prefill or not isinstance(seq.job, PrefillJob)):
            yield seq


def _num_hits(seq: Sequence, pool: BlockPool) -> int:
    """Tokens that a prefix hit would bring now; walks only on from where it last came to."""
    seq.num_hits_seen += pool.count_hits(seq.reusable(pool.block_size)[seq.num_hits_seen :])
    return seq.num_hits_seen * pool.block_size
