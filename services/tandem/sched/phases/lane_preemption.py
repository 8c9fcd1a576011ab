"""Let waiting sequences take seats and KV blocks of running ones in less urgent lanes.

A sequence that yields is preempted, to be computed again: it loses no token, and what is left of its blocks in the
prefix cache, in device or host memory, is not computed twice. It yields at most `max_lane_preemptions` times.
Whatever preempted a sequence, more urgent lanes go before it while it waits, but not for longer than
`max_lane_pause_s`: then it is promoted. It is the next to start, others yield to it as to an interactive one, and it
yields no more.
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
    """Return whether a running sequence may yield to one in `lane`. Sequences whose blocks another worker may read
    yield nothing."""
    is_read = isinstance(seq.job, PrefillJob) or seq.migration_state is not MigrationState.NONE
    return seq.served_lane > lane and seq.num_yields < limits.max_lane_preemptions and not is_read


def preempt_for_urgent(state: SchedulerState, builder: PlanBuilder) -> frozenset[SeqId]:
    """Preempt the running sequences that yield to waiting ones, the least urgent and youngest first.

    A sequence in an open plan cannot be preempted yet. Returns these: the next plan leaves them out, so that one of the
    following ones can preempt them."""
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
    """Return whether a running sequence may yield to a waiting one, now or once more blocks are free."""
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
    """Yield the running sequences that are to make room for waiting ones, each with the one that gets its room: for all
    pulls, and for the first prompt.

    Further prompts wait for the next plans, because a step may have prefill budget for no more than one. Waiting
    sequences are served in order. The first for which room can not be made ends the search, because it holds back all
    later ones.
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
    """Return whether the next token of a decoding sequence takes a block."""
    return seq.num_remaining == 1 and seq.num_planned == len(seq.table) * block_size
