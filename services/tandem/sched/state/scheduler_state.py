"""Own the sequences of one worker: their queues, their keys, the blocks reserved for pulls, and the open plans.

The phases of a step are functions over this state. They read its queues freely, and change them only through its
methods.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import chain

from tandem.core.ids import JobKey, SeqId
from tandem.core.lane import Lane
from tandem.core.request import Job, PrefillJob
from tandem.core.request_stages import WaitCause
from tandem.kv.block_pool import BlockPool
from tandem.sched.state.limits import Capacity, SchedulerLimits, num_seats, pull_need
from tandem.sched.state.schedule_result import PullAllocated
from tandem.sched.state.sequence import FIRST_PRIORITY, Order, Sequence, Status
from tandem.sched.state.step_plan import ScheduledSlice, StepPlan


class OrderedQueue(list[Sequence]):
    """List of sequences in service order: lane, priority, arrival. It is changed by `add` and `remove` only.

    A preempted sequence keeps its arrival number. When it is added again, it is therefore ahead of all sequences of its
    lane and priority that arrived after it.
    """

    def add(self, seq: Sequence) -> None:
        """Insert a sequence into the queue at the position that follows from its lane, priority and arrival."""
        insort(self, seq, key=_order)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence; raise AssertionError if it is not in the queue."""
        index = bisect_left(self, seq.order, key=_order)
        assert index < len(self) and self[index] is seq, f"{seq!r} is not queued"
        del self[index]


def _order(seq: Sequence) -> Order:
    return seq.order


class SchedulerState:
    """Own all sequences of a worker, and move them between its queues and open plans.

    A sequence is in exactly one of `waiting`, `running`, `pulling` and `closing`, according to its `status`.

    - `by_id`: all sequences, by id. `by_key`: by the key of each choice that has not ended, the sequence that computes
      it.
    - `paused_at`: by id, the sequences that had begun and now wait to go on, each with the time at which this wait
      began, in seconds of the caller's clock. Each was preempted, or is a choice that got no seat when its job was
      forked.
    - `reserved_blocks`: by sequence id, the number of blocks reserved for each pull that holds no blocks yet.
    - `open_plans`: the plans whose results have not been applied, by number, oldest first. `num_plans`: the number of
      the next plan.
    - `filled_pulls`: by the number of each open plan, the pulled sequences into whose blocks the plan copies content
      from host memory. Each of these sequences counts the plan in `num_open_plans` and keeps its blocks until the
      copies are made.
    - `now`: time of the latest plan, in seconds of the caller's clock.
    - `held_back_by`: what is missing where a waiting sequence keeps all later ones from starting (a seat, blocks or
      prefill budget); None if no sequence does so. It is determined by each plan that may start waiting sequences.
    """

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting = OrderedQueue()
        self.running = OrderedQueue()
        self.pulling: dict[JobKey, Sequence] = {}
        self.closing: dict[SeqId, Sequence] = {}
        self.by_key: dict[JobKey, Sequence] = {}
        self.by_id: dict[SeqId, Sequence] = {}
        self.paused_at: dict[SeqId, float] = {}
        self.reserved_blocks: dict[SeqId, int] = {}
        self.open_plans: dict[int, StepPlan] = {}
        self.filled_pulls: dict[int, list[Sequence]] = {}
        self.num_plans = 0
        self.now = 0.0
        self.held_back_by: WaitCause | None = None

    @property
    def num_seated(self) -> int:
        """Count the sequences that run or whose KV is being pulled; each takes one of the `max_num_seqs` seats."""
        return len(self.running) + len(self.pulling)

    @property
    def num_free_seats(self) -> int:
        """Count the free seats: `max_num_seqs`, less the sequences that run or whose KV is being pulled."""
        return self.limits.max_num_seqs - len(self.running) - len(self.pulling)

    @property
    def num_reserved(self) -> int:
        """Count the blocks that are reserved for all pulls that hold no blocks yet."""
        return sum(self.reserved_blocks.values())

    @property
    def largest_reservation(self) -> int:
        """Return the number of blocks of the largest reservation for a pull; 0 if no blocks are reserved."""
        return max(self.reserved_blocks.values(), default=0)

    def lane_uses(self, *, with_reservations: bool = False) -> list[Capacity]:
        """Return the seats and blocks of all sequences that run or whose KV is being pulled, as a list indexed by lane.

        `with_reservations` adds the seats and blocks that are reserved for waiting pulls. A sequence that stands for
        several choices counts with the seats that its choices will take. Blocks that only a lease holds do not count.
        """
        blocks, seats = [0] * len(Lane), [0] * len(Lane)
        for seq in chain(self.running, self.pulling.values()):
            blocks[seq.lane] += len(seq.table)
            seats[seq.lane] += self.num_seats_of(seq)
        for seq_id, num_reserved in self.reserved_blocks.items() if with_reservations else ():
            seq = self.by_id[seq_id]
            blocks[seq.lane] += num_reserved
            seats[seq.lane] += self.num_seats_of(seq)
        return [Capacity(*use) for use in zip(blocks, seats, strict=True)]

    def lane_paused(self) -> tuple[int, ...]:
        """Count, for each lane in the order of `Lane`, the sequences that had begun and now wait to go on: preempted
        ones, and choices that got no seat when their job was forked."""
        counts = [0] * len(Lane)
        for seq_id in self.paused_at:
            counts[self.by_id[seq_id].lane] += 1
        return tuple(counts)

    def num_seats_of(self, seq: Sequence) -> int:
        """Return the number of seats that a sequence takes on this worker. A sequence that stands for several choices
        counts with the seats that these will take once it is forked. The number is 1 for a prefill, whose choices
        continue on another worker."""
        return 1 if isinstance(seq.job, PrefillJob) else min(len(seq.choices), num_seats(seq.job, self.limits))

    # ---- sequences

    def hold_back(self, seqs: Iterable[Sequence], cause: WaitCause | None) -> None:
        """Record that the first of the waiting sequences `seqs` could not start in the latest plan because it lacks
        `cause`, and that all others of `seqs` wait for the same cause. `cause` is None if no sequence keeps later ones
        from starting.

        Does nothing where `cause` is the same as at the last call.
        """
        if cause is self.held_back_by:
            return
        self.held_back_by = cause
        if cause is not None:
            for seq in seqs:
                seq.wait_for(cause, self.now)

    def enqueue(self, seq: Sequence) -> None:
        """Add a new sequence to the waiting ones; if its KV is to be pulled, reserve blocks for it."""
        self.by_id[seq.id] = seq
        self.by_key.update(dict.fromkeys(seq.keys, seq))
        if seq.is_pull:
            self.reserved_blocks[seq.id] = self._pull_need(seq.job)
        self.waiting.add(seq)

    def start(self, seq: Sequence, num_computed: int) -> None:
        """Move a waiting sequence to the running ones. Its table already holds blocks with the KV of `num_computed`
        tokens. If it had begun before, record how long it was paused."""
        self.waiting.remove(seq)
        paused_at = self.paused_at.pop(seq.id, None)
        if paused_at is not None:
            seq.add_pause(max(0.0, self.now - paused_at))
        seq.num_computed = num_computed
        seq.was_started = True
        seq.status = Status.RUNNING
        self.running.add(seq)

    def park_for_pull(self, seq: Sequence) -> None:
        """Move a waiting sequence to those whose KV is being pulled. Its reservation ends, because its table holds the
        reserved blocks now."""
        self.waiting.remove(seq)
        del self.reserved_blocks[seq.id]
        seq.was_started = True
        seq.status = Status.PULLING
        self.pulling[seq.key] = seq

    def start_pulled(self, key: JobKey) -> Sequence:
        """Move a sequence whose KV has arrived to the running ones, and return it. `key` names its first choice;
        KeyError for any other."""
        seq = self.pulling.pop(key)
        seq.status = Status.RUNNING
        self.running.add(seq)
        return seq

    def preempt(self, seq: Sequence) -> None:
        """Release the blocks of a running sequence, and move it back to the waiting ones to be computed again."""
        self.running.remove(seq)
        self.paused_at[seq.id] = self.now
        self.pool.release(seq.table)
        seq.num_computed = 0
        seq.status = Status.WAITING
        self.waiting.add(seq)

    def promote(self, seq: Sequence) -> None:
        """Promote a waiting sequence: from now on it is served before all sequences that are not promoted, whatever
        their lanes."""
        self.waiting.remove(seq)
        seq.order = (Lane.INTERACTIVE, FIRST_PRIORITY, seq.order[-1])
        self.waiting.add(seq)

    def replace_by_branches(self, seq: Sequence, ended: Iterable[JobKey], others: Iterable[Sequence]) -> None:
        """Record that a running sequence of several choices was forked into one sequence for each choice that goes on.

        - `seq`: the forked sequence, which now stands for the first choice that goes on.
        - `ended`: the keys of all choices for which `seq` stood before the fork, also of those that go on. They are
          removed from `by_key`, and the keys of the choices that go on are added again.
        - `others`: the new sequences of the other choices that go on, each RUNNING or WAITING. Those that wait count as
          paused since the latest plan (`now` of this state).
        """
        for key in ended:
            del self.by_key[key]
        self.by_key[seq.key] = seq
        for other in others:
            if other.status is Status.WAITING:
                self.paused_at[other.id] = self.now
            self.by_id[other.id] = other
            self.by_key[other.key] = other
            (self.running if other.status is Status.RUNNING else self.waiting).add(other)

    def finish_choice(self, seq: Sequence, key: JobKey) -> None:
        """End one choice of a sequence; with its last choice, end the sequence as `finish` does."""
        if len(seq.choices) > 1:
            seq.choices.remove(key.choice)
            del self.by_key[key]
        else:
            self.finish(seq)

    def finish(self, seq: Sequence) -> None:
        """End a sequence with all its choices.

        Its blocks are released immediately, or by `release_finished` if an open plan still contains the sequence.
        """
        for key in seq.keys:
            del self.by_key[key]
        self.reserved_blocks.pop(seq.id, None)
        self.paused_at.pop(seq.id, None)
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
        elif seq.status is Status.PULLING:
            del self.pulling[seq.key]
        else:
            self.running.remove(seq)
        if seq.num_open_plans:
            seq.status = Status.CLOSING
            self.closing[seq.id] = seq
        else:
            self._forget(seq)

    def release_finished(self) -> None:
        """Release the blocks of ended sequences that are in no open plan any more."""
        for seq in [seq for seq in self.closing.values() if seq.num_open_plans == 0]:
            del self.closing[seq.id]
            self._forget(seq)

    # ---- plans

    def open_plan(self, plan: StepPlan, pulls: Iterable[PullAllocated]) -> None:
        """Record a plan, whose number must be `num_plans`, as open. `pulls`: the pulls that got blocks while it was
        planned."""
        filled = {block for _, block in plan.fills}
        held = [self.pulling[pull.key] for pull in pulls if not filled.isdisjoint(pull.table.ids())] if filled else []
        for seq in held:
            seq.num_open_plans += 1
        self.filled_pulls[plan.number] = held
        self.open_plans[plan.number] = plan
        self.num_plans += 1

    def close_plan(self, number: int) -> StepPlan:
        """Remove and return the oldest open plan. Raises ValueError if its number is not `number`."""
        oldest = next(iter(self.open_plans), None)
        if number != oldest:
            raise ValueError(f"result of plan {number}, but the oldest open plan is {oldest}")
        for seq in self.filled_pulls.pop(number):
            seq.num_open_plans -= 1
        return self.open_plans.pop(number)

    # ---- invariants

    def check(self) -> None:
        """Compare queues and the counters of sequences with a recount from the open plans; raise AssertionError naming
        the first difference."""
        queued = [*self.waiting, *self.running, *self.pulling.values(), *self.closing.values()]
        assert sorted(s.id for s in queued) == sorted(self.by_id), "a sequence is in no queue or in two"
        keys = {key for s in queued if s.status is not Status.CLOSING for key in s.keys}
        assert keys == set(self.by_key), "keys and queues differ"
        needed = {s.id: self._pull_need(s.job) for s in queued if s.is_pull and s.status is Status.WAITING}
        assert self.reserved_blocks == needed, f"reserved {self.reserved_blocks}, needed {needed}"
        begun = {s.id for s in self.waiting if s.was_started}
        assert self.paused_at.keys() == begun, f"{begun} have begun and wait, not {self.paused_at.keys()}"
        for seq in queued:
            slices = [s for p in self.open_plans.values() for s in p.slices if s.seq == seq.id]
            num_held = sum(held.count(seq) for held in self.filled_pulls.values())
            _check_sequence(seq, slices, num_held, self.pool)
            assert (seq.status is Status.WAITING) == (seq in self.waiting), f"{seq!r}: status"
        assert self.num_seated <= self.limits.max_num_seqs, "more than max_num_seqs run"

    def __str__(self) -> str:
        queues = f"{len(self.running)} running, {len(self.waiting)} waiting, {len(self.pulling)} pulling"
        return f"{queues}, {len(self.closing)} closing, {len(self.open_plans)} plans open"

    def _forget(self, seq: Sequence) -> None:
        self.pool.release(seq.table)
        del self.by_id[seq.id]

    def _pull_need(self, job: Job) -> int:
        return pull_need(job, self.limits, self.pool.num_blocks, self.pool.block_size)


def _check_sequence(seq: Sequence, named: list[ScheduledSlice], num_held: int, pool: BlockPool) -> None:
    """Check the counters of a sequence. `named`: the slices of open plans that compute it. `num_held`: number of open
    plans that copy content into the blocks of its pull."""
    assert seq.num_open_plans == len(named) + num_held, f"{seq!r}: open plans"
    if seq.status is Status.CLOSING:
        assert seq.num_open_plans, f"{seq!r} is closing without an open plan"
        return
    assert seq.num_in_flight == sum(s.num_certain for s in named), f"{seq!r}: tokens in flight"
    assert seq.num_drafted == sum(s.num_drafted for s in named), f"{seq!r}: guesses in flight"
    assert not any(s.num_drafted for s in named[:-1]), f"{seq!r} is planned beyond its guesses"
    assert seq.num_pending == sum(1 for s in named if s.sampling), f"{seq!r}: pending tokens"
    assert seq.num_computed <= len(seq.tokens), f"{seq!r}: computed more than is known"
    planned = seq.num_planned + seq.num_drafted
    assert planned <= len(seq.table) * pool.block_size, f"{seq!r}: planned beyond its blocks"
    if seq.status is Status.WAITING:
        assert not len(seq.table) and not planned, f"{seq!r} waits but holds something"
