"""Let waiting sequences take seats and KV blocks of running ones in less urgent lanes.

A sequence that yields is preempted, to be computed again: it loses no token, and what is left of its blocks in the
prefix cache, in device or host memory, is not computed twice. It yields at most `max_lane_preemptions` times.
While it waits for a seat again, more urgent lanes go first, as before any waiting sequence of its lane.
"""

from __future__ import annotations

from collections.abc import Iterator

from tandem.core.ids import SeqId
from tandem.core.lane import Lane
from tandem.core.request import PrefillJob
from tandem.sched.phases.admit_waiting import admissible, num_free_needed
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.state.sequence import MigrationState, Sequence


def may_yield(seq: Sequence, lane: Lane, limits: SchedulerLimits) -> bool:
    """Return whether a running sequence may yield to one in `lane`. Sequences whose blocks another worker may read
    yield nothing."""
    is_read = isinstance(seq.job, PrefillJob) or seq.migration_state is not MigrationState.NONE
    return seq.lane > lane and seq.num_yields < limits.max_lane_preemptions and not is_read


def preempt_for_urgent(state: SchedulerState, builder: PlanBuilder) -> frozenset[SeqId]:
    """Preempt the running sequences that yield to waiting ones, the least urgent and youngest first.

    A sequence in an open plan cannot be preempted yet. Returns these: the next plan leaves them out, so that one of the
    following ones can preempt them."""
    yielding = list(_yielding(state))
    for seq in yielding:
        if not seq.num_open_plans:
            seq.num_yields += 1
            state.preempt(seq)
            builder.num_yielded += 1
    return frozenset(seq.id for seq in yielding if seq.num_open_plans)


def is_preemption_due(state: SchedulerState) -> bool:
    """Return whether a running sequence is to yield to a waiting one."""
    return any(True for _ in _yielding(state))


def _yielding(state: SchedulerState) -> Iterator[Sequence]:
    """Yield the running sequences that are to make room for waiting ones.

    Waiting sequences are served in order, as long as one step can compute their prompts. The first for which room can
    not be made ends the search: it holds back all later ones, and nothing yields in vain.
    """
    limits, pool = state.limits, state.pool
    num_seats, num_blocks, num_tokens = state.num_free_seats, pool.num_free, limits.max_num_batched_tokens
    num_growing = len(state.running)
    running = list(state.running) if limits.max_lane_preemptions and len(state.waiting) else []
    for seq in admissible(state):
        if not running or running[-1].lane <= seq.lane or num_tokens <= 0:
            return
        # Those that may not yield to this sequence do not yield to the later, less urgent ones either.
        running = [other for other in running if may_yield(other, seq.lane, limits)]
        hashes = seq.reusable(pool.block_size)
        hits = frozenset(pool.cached(hashes))
        num_seats -= 1
        num_blocks -= num_free_needed(state, seq)
        num_tokens -= 0 if seq.is_pull else len(seq.tokens) - pool.count_hits(hashes) * pool.block_size
        victims: list[Sequence] = []
        while num_seats < 0 or num_blocks < (0 if seq.is_pull else num_growing):
            if not running:
                return
            victims.append(victim := running.pop())
            num_seats += 1
            num_growing -= 1
            num_blocks += pool.num_freed(victim.table, hits)
        num_growing += not seq.is_pull
        yield from victims
