"""Let waiting sequences take seats and KV blocks of running ones in less urgent lanes.

A sequence that yields its seat and blocks is preempted, to be computed again. It loses no token, and the blocks that
stay in the prefix cache, in device or host memory, are not computed twice. A sequence yields at most
`max_lane_preemptions` times. While a preempted sequence waits, for whatever reason it was preempted, more urgent lanes
are served before it. After `max_lane_pause_s` seconds it is promoted: it is the next to start, others yield to it as to
an interactive one, and it yields no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tandem.core.ids import SeqId
from tandem.core.lane import Lane
from tandem.core.request import PrefillJob
from tandem.kv.room_forecast import RoomForecast
from tandem.sched.phases.admit_waiting import admissible, num_first_blocks, waits_for_leases
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.state.sequence import MigrationState, Sequence


def may_yield(seq: Sequence, lane: int, limits: SchedulerLimits) -> bool:
    """Return whether a running sequence may be preempted so that a sequence in `lane` gets its seat and blocks.

    The running sequence must be served in a less urgent lane than `lane`, and must have yielded fewer than
    `max_lane_preemptions` times. A sequence whose blocks another worker may read is never preempted.
    """
    is_read = isinstance(seq.job, PrefillJob) or seq.migration_state is not MigrationState.NONE
    return seq.served_lane > lane and seq.num_yields < limits.max_lane_preemptions and not is_read


def preempt_for_urgent(state: SchedulerState, builder: PlanBuilder) -> frozenset[SeqId]:
    """Preempt running sequences so that waiting ones of more urgent lanes get their seats and blocks. The running
    sequence that is last in the order of service is preempted first.

    Before this, waiting sequences that were paused for `max_lane_pause_s` seconds are promoted. Returns the ids of
    running sequences that should yield but cannot be preempted yet, because an open plan contains them. The plan that
    is being built must leave them out, so that a later one can preempt them.
    """
    since = state.now - state.limits.max_lane_pause_s
    for seq_id, paused_at in state.paused_at.items():
        seq = state.by_id[seq_id]
        if paused_at <= since and not seq.is_promoted:
            state.promote(seq)
    yielding = list(_yielding(state))
    for seq, urgent in yielding:
        if not seq.num_open_plans:
            seq.num_yields += 1
            urgent.add_yield(seq)
            state.preempt(seq)
            builder.note_yield(seq)
    return frozenset(seq.id for seq, _ in yielding if seq.num_open_plans)


def may_preempt(state: SchedulerState) -> bool:
    """Return whether the next plans may preempt a running sequence for a waiting one of a more urgent lane. Only lanes
    and numbers of preemptions are compared, not whether the waiting sequence lacks a seat or blocks."""
    least_urgent = next(reversed(state.running), None)
    if not state.limits.max_lane_preemptions or least_urgent is None:
        return False
    first = next((seq for seq in state.waiting if seq.may_start), None)
    if first is None:
        return False
    # A paused sequence may be promoted any time.
    lane = Lane.INTERACTIVE if state.paused_at else first.served_lane
    return least_urgent.served_lane > lane and any(may_yield(seq, lane, state.limits) for seq in state.running)


def _yielding(state: SchedulerState) -> Iterator[tuple[Sequence, Sequence]]:
    """Yield pairs (running sequence to preempt, waiting sequence that gets its room). Room is made for all waiting
    pulls, and for the first waiting prompt.

    Further prompts wait for the next plans, because a step may have prefill budget for no more than one. Waiting
    sequences are considered in order of service. The first one for which no room can be made ends the search, because
    it holds back all later ones.
    """
    if not may_preempt(state):
        return
    candidates = deque(seq for seq in reversed(state.running) if may_yield(seq, Lane.INTERACTIVE, state.limits))
    num_seats, num_running = state.num_free_seats, len(state.running)
    # Decodes of this plan take blocks before anything starts.
    num_growing = sum(_grows(seq, state.pool.block_size) for seq in state.running)
    room = RoomForecast(state.pool)
    is_first_prompt = may_compute = True
    for seq in admissible(state):
        if not candidates:
            return
        may_compute = may_compute and not waits_for_leases(state, seq)
        if not (may_compute or seq.is_pull):
            continue
        may_take = seq.is_pull or is_first_prompt
        num_seats -= 1
        room.fill(seq.reusable(state.pool.block_size), num_first_blocks(state, seq))
        victims: list[Sequence] = []
        while num_seats < 0 or room.num_free < num_growing + (0 if seq.is_pull else num_running):
            if not may_take or not candidates or candidates[0].served_lane <= seq.served_lane:
                return
            victims.append(victim := candidates.popleft())
            room.release(victim.table)
            num_seats += 1
            num_running -= 1
            num_growing -= _grows(victim, state.pool.block_size)
        num_running += not seq.is_pull
        is_first_prompt &= seq.is_pull
        yield from ((victim, seq) for victim in victims)


def _grows(seq: Sequence, block_size: int) -> bool:
    """Return whether a sequence decodes and needs a new block for its next token."""
    return seq.num_remaining == 1 and seq.num_planned == len(seq.table) * block_size
