"""Find room for the blocks of a slice; preempt sequences, to be recomputed, where no block is free.

The victim is the youngest sequence that the plan has not reached, that no open plan names, and whose blocks no other
worker may read.
"""

from __future__ import annotations

from tandem.core.request import PrefillJob
from tandem.sched.phases.fork import shares_tail
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.state.sequence import MigrationState, Sequence


def make_room(state: SchedulerState, builder: PlanBuilder, seq: Sequence, num_blocks: int) -> bool:
    """Grow a table and make its last block exclusive. Preempts sequences for it, the youngest first, none older than
    `seq`, and possibly `seq` itself. Returns whether the room was found."""
    while not (state.pool.grow(seq.table, num_blocks) and _own_tail(state, builder, seq)):
        victim = _victim(state, builder, seq)
        if victim is None:
            return False
        state.preempt(victim)
        builder.num_preempted += 1
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
