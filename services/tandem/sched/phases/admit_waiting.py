"""Start waiting sequences: give them seats (places of `max_num_seqs`) and their first KV blocks, within the limit of
the batch lane."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from tandem.core.lane import Lane
from tandem.core.request import PrefillJob
from tandem.core.request_stages import WaitCause
from tandem.kv.block_pool import Holder
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.phases.slices import plan_slice
from tandem.sched.state.limits import Capacity, blocks_for, may_offer
from tandem.sched.state.schedule_result import PullAllocated, SequenceStarted
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.state.sequence import Sequence


def admissible(state: SchedulerState) -> Iterator[Sequence]:
    """Yield, in order of service, the waiting sequences that could start now if seats, blocks and prefill budget
    sufficed.

    Sequences that wait for another worker, prefills that wait for leases to end, and batch prompts that wait for the
    limit of their lane are left out.
    """
    checks = _StartChecks(state)
    for seq in state.waiting:
        if seq.may_start and checks.obstacle(seq) is None:
            yield seq


def startable(state: SchedulerState, builder: PlanBuilder) -> Iterator[Sequence]:
    """Yield, in order of service, the waiting prompts that may get a part of this step's prefill budget, at most as
    many as there are free seats (places of `max_num_seqs`)."""
    prompts = (seq for seq in admissible(state) if not seq.is_pull and seq.id not in builder.yielded)
    return islice(prompts, state.num_free_seats)


def admit_waiting(state: SchedulerState, builder: PlanBuilder) -> None:
    """Start waiting sequences that got a part of the prefill budget, in order of service, and allocate blocks to pulls.

    Adds the started sequences and the pulls to `builder`. A sequence without room holds back all later ones, so that no
    sequence is overtaken for ever, with these exceptions:

    - A sequence that waits for another worker holds back no other. A batch prompt that waits for the limit of its lane
      holds back only other batch prompts.
    - A sequence that has yielded in this plan does not start in it, and holds back no other.
    - A prefill that may not lease its blocks yet holds back only other prefills.
    - A sequence that needs more blocks than the pool has without the leased ones holds back all later ones except
      pulls. It waits for leases to end, and the workers that hold them may lack room until pulls of this worker are
      done.
    """
    waiting = [seq for seq in state.waiting if seq.may_start and seq.id not in builder.yielded]
    index, cause = _admit(state, builder, waiting) if waiting else (0, None)
    state.hold_back(waiting[index:], cause)


def _admit(state: SchedulerState, builder: PlanBuilder, waiting: list[Sequence]) -> tuple[int, WaitCause | None]:
    """Start sequences of `waiting` in order, and allocate blocks to pulls, until one sequence holds back all later
    ones. Returns the index of this sequence and what it lacks; the length of `waiting` and None if no sequence does
    so."""
    checks = _StartChecks(state)
    for index, seq in enumerate(waiting):
        if not state.num_free_seats:
            return index, WaitCause.SEAT
        if seq.is_pull:
            cause = None if _grant_pull(state, builder, seq) else WaitCause.BLOCKS
        else:
            cause = None if checks.keeps_back(seq, builder) else _start(state, builder, seq)
        if cause is not None:
            if not waits_for_leases(state, seq):
                return index, cause
            checks.wait_for_leases(seq)
    return len(waiting), None


class _StartChecks:
    """Decide which waiting sequences must not start in a plan, while some of those after them may.

    Batch prompts may start up to `batch_max_share` of the seats and of the KV blocks. This limit is checked when a
    sequence starts; choices and blocks that it adds later may exceed the limit. Seats and blocks that are reserved for
    pulls do not count. If prompts waited for them, two workers could wait for each other for ever, see `job_admission`.
    Therefore pulls and prompts may exceed the limit together. A promoted sequence may always start. Once the limit has
    refused a prompt, it refuses all later ones too, so that no smaller one overtakes it for ever.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._may_compute = True
        self._may_prefill = True
        # What batch sequences take, with those that may start; None if all batch sequences may.
        self._batch_use = state.lane_uses()[Lane.BATCH] if state.limits.batch_max_share < 1 else None
        self._is_batch_full = False

    def keeps_back(self, seq: Sequence, builder: PlanBuilder) -> bool:
        """Return whether a prompt must not start in this plan; if so, record what the prompt waits for."""
        cause = self.obstacle(seq) if builder.has_prefill_budget(seq) else self._cause_without_budget(seq)
        if cause is not None:
            seq.wait_for(cause, self._state.now)
        return cause is not None

    def wait_for_leases(self, seq: Sequence) -> None:
        """Keep all prompts after `seq` from starting in this plan, because `seq` needs blocks that are leased."""
        self._may_compute = False
        seq.wait_for(WaitCause.LEASES, self._state.now)

    def obstacle(self, seq: Sequence) -> WaitCause | None:
        """Return what a sequence waits for if it must not start now. Otherwise count it towards the limit of its lane,
        and return None."""
        if not self._may_compute:
            return WaitCause.LEASES
        if isinstance(seq.job, PrefillJob):
            self._may_prefill = self._may_prefill and self._may_offer(seq)
            if not self._may_prefill:
                return WaitCause.LEASES
        if self._exceeds_batch_share(seq):
            self._is_batch_full = True
            return WaitCause.BATCH_SHARE
        if self._batch_use is not None and seq.lane == Lane.BATCH and not seq.is_pull:
            self._batch_use = self._batch_use.plus(self._need(seq))
        return None

    def _cause_without_budget(self, seq: Sequence) -> WaitCause:
        """Return what a prompt that got no part of the prefill budget waits for. The prompt is not counted towards any
        limit."""
        is_prefill = isinstance(seq.job, PrefillJob)
        if not self._may_compute or (is_prefill and not (self._may_prefill and self._may_offer(seq))):
            return WaitCause.LEASES
        return WaitCause.BATCH_SHARE if self._exceeds_batch_share(seq) else WaitCause.PROMPTS_AHEAD

    def _may_offer(self, seq: Sequence) -> bool:
        state, pool = self._state, self._state.pool
        return may_offer(_num_blocks(state, seq), pool.num_leased, pool.num_blocks, state.largest_reservation)

    def _exceeds_batch_share(self, seq: Sequence) -> bool:
        if self._batch_use is None or seq.is_pull or seq.lane != Lane.BATCH or seq.is_promoted:
            return False
        use = self._batch_use.plus(self._need(seq))
        return self._is_batch_full or is_over_batch_share(self._state, self._batch_use, use)

    def _need(self, seq: Sequence) -> Capacity:
        return Capacity(_num_blocks(self._state, seq), self._state.num_seats_of(seq))


def is_over_batch_share(state: SchedulerState, before: Capacity, after: Capacity) -> bool:
    """Return whether the batch sequences would take more seats or blocks than `batch_max_share` allows if one more
    started.

    `before`, `after`: what the batch sequences take without and with this one. The first batch sequence is always
    allowed, so that every request can run.
    """
    share = state.limits.batch_max_share + 1e-9
    num_seats, num_blocks = share * state.limits.max_num_seqs, share * state.pool.num_blocks
    return before.num_seats > 0 and (after.num_seats > num_seats or after.num_blocks > num_blocks)


def _start(state: SchedulerState, builder: PlanBuilder, seq: Sequence) -> WaitCause | None:
    """Start a sequence that is computed on this worker, plan its first slice, and return None. If budget or blocks are
    missing, change nothing and return what the sequence waits for."""
    pool = state.pool
    hashes = seq.reusable(pool.block_size)
    cached = pool.count_hits(hashes) * pool.block_size
    if builder.chunk_of(seq, len(seq.tokens) - cached) == 0:
        return WaitCause.PROMPTS_AHEAD
    if not _take_blocks(state, seq):
        return WaitCause.BLOCKS
    if not seq.was_started:
        seq.num_cached = cached
    waits = seq.take_waits(state.now)
    state.start(seq, cached)
    leased = seq.table.ids() if isinstance(seq.job, PrefillJob) else ()
    pool.retain(leased, Holder.LEASE)
    builder.starts.append(SequenceStarted(seq.key, seq.num_cached, leased, waits))
    plan_slice(state, builder, seq)
    return None


def _grant_pull(state: SchedulerState, builder: PlanBuilder, seq: Sequence) -> bool:
    """Give a pull its reserved blocks. Returns False, without a change, where too few are free."""
    num_hits = state.pool.count_hits(seq.reusable(state.pool.block_size))
    if not _take_blocks(state, seq):
        return False
    waits = seq.take_waits(state.now)
    state.park_for_pull(seq)
    builder.pulls.append(PullAllocated(seq.key, seq.table, num_hits, _num_blocks(state, seq), waits))
    return True


def waits_for_leases(state: SchedulerState, seq: Sequence) -> bool:
    """Return whether a waiting prompt needs more blocks than the pool has without the leased ones, so that it cannot
    start before leases end. False for a pull."""
    return not seq.is_pull and _num_blocks(state, seq) > state.pool.num_blocks - state.pool.num_leased


def num_first_blocks(state: SchedulerState, seq: Sequence) -> int:
    """Return how many blocks a waiting sequence gets when it starts: the reserved ones for a pull, else one for every
    `block_size` known tokens, rounded up."""
    return state.reserved_blocks[seq.id] if seq.is_pull else _num_blocks(state, seq)


def _take_blocks(state: SchedulerState, seq: Sequence) -> bool:
    """Give a waiting sequence, whose table is empty, its first blocks. Returns False, without a change, when too few
    are free.

    Except for a pull, one free block must be left for each running sequence to grow into.
    """
    pool, num_blocks = state.pool, num_first_blocks(state, seq)
    hashes = seq.reusable(pool.block_size)
    spare = 0 if seq.is_pull else len(state.running)
    if pool.num_free_needed(hashes, num_blocks) + spare > pool.num_free:
        return False
    pool.share(seq.table, hashes)
    grown = pool.grow(seq.table, num_blocks)
    assert grown, "room was counted"
    return True


def _num_blocks(state: SchedulerState, seq: Sequence) -> int:
    return blocks_for(len(seq.tokens), state.pool.block_size)
