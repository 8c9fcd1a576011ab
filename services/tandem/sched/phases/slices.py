"""Plan the slices of running sequences, in order: one token of each decode, then chunks of prompts."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.core.ids import BlockId
from tandem.core.request import PrefillJob
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.phases.preemption import make_room
from tandem.sched.state.block_needs import blocks_for
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.state.sequence import MigrationState, Sequence, Status
from tandem.sched.state.step_plan import ScheduledSlice


def plan_decodes(state: SchedulerState, builder: PlanBuilder, ready: Iterable[Sequence]) -> None:
    """Plan one token of each schedulable sequence that decodes and was not preempted for an older one."""
    for seq in ready:
        if seq.num_remaining == 1 and seq.status is Status.RUNNING:
            plan_slice(state, builder, seq)


def plan_prefills(state: SchedulerState, builder: PlanBuilder, started: Iterable[Sequence]) -> None:
    """Plan the prompts that run already, with the budget that waiting prompts did not use."""
    builder.redistribute_prefill_budget()
    for seq in started:
        plan_slice(state, builder, seq)


def plan_slice(state: SchedulerState, builder: PlanBuilder, seq: Sequence) -> None:
    """Plan the next chunk or token of a running sequence, if budget and blocks allow."""
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

    The partly filled last block counts when a prompt ends, or with the last token of a sequence that migrates.
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
    """Freeze a migrating sequence if the token of this slice can be its last one here: the `num_left` blocks without a
    digest can be digested with it."""
    if seq.migration_state is not MigrationState.FINALIZING or num_left > num_digests_left:
        return False
    seq.migration_state = MigrationState.FROZEN
    return True
