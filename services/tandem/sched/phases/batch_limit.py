"""Limit what batch sequences take of a worker's seats (places of `max_num_seqs`) and KV blocks."""

from __future__ import annotations

from tandem.core.lane import Lane
from tandem.sched.state.limits import Capacity
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.state.sequence import Sequence


class BatchLimit:
    """Decide which waiting batch prompts may start, by `batch_max_share`; sequences of other lanes always may.

    The limit is checked when a sequence starts; choices and blocks that it adds later may exceed the limit. Seats and
    blocks that are reserved for pulls do not count. If prompts waited for them, two workers could wait for each other
    for ever, see `job_admission`. Therefore pulls and prompts may exceed the limit together.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._use = state.lane_uses()[Lane.BATCH] if state.limits.batch_max_share < 1 else None
        self._state = state
        self._is_reached = False

    def admits(self, seq: Sequence, num_blocks: int) -> bool:
        """Return whether a waiting sequence, which will take `num_blocks` blocks, may start. If so, its seats and
        blocks count towards the limit from now on. A promoted sequence always may start.

        Once the limit has refused a prompt, it refuses all later ones too, so that no smaller one overtakes it for
        ever.
        """
        if self._use is None or seq.is_pull or seq.lane != Lane.BATCH:
            return True
        if self.refuses(seq, num_blocks):
            self._is_reached = True
            return False
        self._use = self._use.plus(Capacity(num_blocks, self._state.num_seats_of(seq)))
        return True

    def refuses(self, seq: Sequence, num_blocks: int) -> bool:
        """Return whether the limit keeps a waiting sequence, which will take `num_blocks` blocks, from starting. Unlike
        `admits`, count nothing towards the limit."""
        if self._use is None or seq.is_pull or seq.lane != Lane.BATCH or seq.is_promoted:
            return False
        use = self._use.plus(Capacity(num_blocks, self._state.num_seats_of(seq)))
        return self._is_reached or is_over_limit(self._state, self._use, use)


def is_over_limit(state: SchedulerState, before: Capacity, after: Capacity) -> bool:
    """Return whether the batch sequences would take more seats or blocks than `batch_max_share` allows if one more
    started.

    `before`, `after`: what the batch sequences take without and with this one. The first batch sequence is always
    allowed, so that every request can run.
    """
    share = state.limits.batch_max_share + 1e-9
    num_seats, num_blocks = share * state.limits.max_num_seqs, share * state.pool.num_blocks
    return before.num_seats > 0 and (after.num_seats > num_seats or after.num_blocks > num_blocks)
