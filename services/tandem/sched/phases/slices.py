"""Plan the slices of running sequences, in order of service: one token of each decode, then chunks of prompts.

Where no block is free for a slice, a sequence is preempted, to be recomputed. It is the last one in this order that is
not in the plan yet, that no open plan contains, and whose blocks no other worker may read.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.core.ids import BlockId
from tandem.core.request import PrefillJob
from tandem.core.step_cost import StepFeatures
from tandem.kv.block_pool import BlockPool
from tandem.sched.budget.prefill_sharing import prompt_of
from tandem.sched.budget.step_sizer import StepSizer
from tandem.sched.budget.step_time_model import features
from tandem.sched.phases.apply_results import shares_tail
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.state.limits import blocks_for
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.state.sequence import MigrationState, Sequence, Status
from tandem.sched.state.step_plan import ScheduledSlice


def plan_decodes(state: SchedulerState, builder: PlanBuilder, ready: Iterable[Sequence]) -> None:
    """Add one token of each decoding sequence of `ready` to the plan. Sequences that were preempted meanwhile are
    skipped."""
    for seq in ready:
        if seq.num_remaining == 1 and seq.status is Status.RUNNING:
            plan_slice(state, builder, seq)


def plan_prefills(state: SchedulerState, builder: PlanBuilder, started: Iterable[Sequence]) -> None:
    """Add the next chunk of each prompt in `started` to the plan. These prompts run already, and may use the budget
    that waiting prompts did not use."""
    builder.redistribute_prefill_budget()
    for seq in started:
        plan_slice(state, builder, seq)


def plan_slice(state: SchedulerState, builder: PlanBuilder, seq: Sequence) -> None:
    """Add the next prompt chunk or output token of a running sequence to the plan, if budget and blocks allow it."""
    num_tokens = builder.chunk_of(seq, seq.num_remaining)
    if num_tokens == 0:
        return
    start = seq.num_planned
    stop = start + num_tokens
    num_blocks = blocks_for(stop, state.pool.block_size)
    if not make_room(state, builder, seq, num_blocks):
        return
    blocks = seq.table.ids(num_blocks)
    sampling = seq.sampling_at(stop)
    digest_blocks = _to_digest(state, builder, seq, stop, blocks, samples=sampling is not None)
    piece = ScheduledSlice(
        seq=seq.id,
        start=start,
        num_tokens=num_tokens,
        tokens=tuple(seq.tokens[start:stop]),
        blocks=blocks,
        sampling=sampling,
        chained=start >= len(seq.tokens),
        digest_blocks=digest_blocks,
        scored=seq.scored_in(start, stop),
        num_top=seq.job.request.prompt_logprobs or 0,
    )
    builder.add(seq, piece)
    seq.num_in_flight += num_tokens
    seq.num_pending += sampling is not None
    seq.num_open_plans += 1


def _to_digest(
    state: SchedulerState, builder: PlanBuilder, seq: Sequence, stop: int, blocks: tuple[BlockId, ...], *, samples: bool
) -> tuple[BlockId, ...]:
    """Return the blocks to digest because another worker may read them after this slice.

    The last block, which may be partly filled, is among them when a prompt ends, or with the last token of a sequence
    that migrates.
    """
    is_prefill = isinstance(seq.job, PrefillJob)
    if not is_prefill and seq.migration_state is MigrationState.NONE:
        return ()
    has_digests = state.limits.digest_handoffs
    if is_prefill:
        ends = stop == len(seq.tokens)
    else:
        num_left = len(blocks) - seq.num_digested if has_digests else 0
        ends = samples and _freeze(seq, num_left, builder.num_digests_left)
    if not has_digests:
        return ()
    num_complete = len(blocks) if ends else stop // state.pool.block_size
    if not is_prefill:
        num_complete = min(num_complete, seq.num_digested + builder.num_digests_left)
        builder.num_digests_left -= max(0, num_complete - seq.num_digested)
    fresh = blocks[seq.num_digested : num_complete]
    seq.num_digested = max(seq.num_digested, num_complete)
    return fresh


def _freeze(seq: Sequence, num_left: int, num_digests_left: int) -> bool:
    """Freeze a migrating sequence if the token of this slice can be its last one on this worker; return whether it can.

    It can if the step may digest all `num_left` blocks that have no digest yet.
    """
    if seq.migration_state is not MigrationState.FINALIZING or num_left > num_digests_left:
        return False
    seq.migration_state = MigrationState.FROZEN
    return True


def make_room(state: SchedulerState, builder: PlanBuilder, seq: Sequence, num_blocks: int) -> bool:
    """Grow the table of a sequence to `num_blocks` blocks, and copy the block that it writes next if others share it.
    Returns whether there was room.

    Where blocks are missing, other running sequences are preempted, the last in the order of service first, but none
    that is before `seq`. If this is not enough, `seq` itself is preempted, unless an open plan contains it or another
    worker may read its blocks, and the result is False.
    """
    while not (state.pool.grow(seq.table, num_blocks) and _own_tail(state, builder, seq)):
        victim = _victim(state, builder, seq)
        if victim is None:
            return False
        state.preempt(victim)
        builder.note_preemption(victim)
        if victim is seq:
            return False
    return True


def _own_tail(state: SchedulerState, builder: PlanBuilder, seq: Sequence) -> bool:
    """Copy the block that the sequence writes next if it is shared; the last holder of a block keeps it without a copy.
    Returns False when there is no free block."""
    if not shares_tail(seq, state.pool):
        return True
    copy = state.pool.make_exclusive(seq.table, seq.num_planned // state.pool.block_size)
    if copy is not None:
        builder.copies.append(copy)
    return copy is not None


def _victim(state: SchedulerState, builder: PlanBuilder, seq: Sequence) -> Sequence | None:
    for candidate in reversed(state.running):
        if candidate.order < seq.order:
            return None
        offered = isinstance(candidate.job, PrefillJob) or candidate.migration_state is not MigrationState.NONE
        if candidate.num_open_plans == 0 and candidate.id not in builder.slices and not offered:
            return candidate
    return None


def assign_prefill_budget(
    state: SchedulerState,
    builder: PlanBuilder,
    pacer: StepSizer,
    started: Iterable[Sequence],
    startable: Iterable[Sequence],
    now: float,
) -> None:
    """Compute the prefill budget of a plan, to which the decodes were added already, and split it among the prompts.

    `pacer` computes the budget. `started`: prompts that run; `startable`: waiting prompts that may start. `now`: the
    present time, in seconds of the caller's clock. Without chunked prefill nothing is split, because prompts are
    computed whole, in order.
    """
    targets = state.limits.targets
    itls = [targets.lane(seq.lane).itl_s for seq in state.running if seq.id in builder.slices]
    target_s = min(filter(None, itls), default=0.0)
    decodes = features(builder.slices.values()) if target_s > 0 else StepFeatures()
    prefill_budget = pacer.budget_for(decodes, builder.budget, target_s)
    if not state.limits.enable_chunked_prefill:
        return
    prompts = [prompt_of(seq, seq.num_planned, targets, now) for seq in started]
    if builder.budget:
        prompts += [prompt_of(seq, _num_hits(seq, state.pool), targets, now) for seq in startable]
    if prompts or state.waiting:
        builder.split_prefill_budget(prompts, prefill_budget)


def _num_hits(seq: Sequence, pool: BlockPool) -> int:
    """Return the length of a sequence's prefix-cache hit in tokens. The lookup continues where the last one of this
    sequence ended."""
    seq.num_hits_seen += pool.count_hits(seq.reusable(pool.block_size)[seq.num_hits_seen :])
    return seq.num_hits_seen * pool.block_size
