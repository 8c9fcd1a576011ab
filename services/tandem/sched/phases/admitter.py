"""Which of the sequences that wait may begin: gives them seats and their first blocks, and adds up what was committed
before; never ends or preempts one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from tandem.core.ids import BlockHash, JobKey, SeqId
from tandem.core.request import PrefillJob
from tandem.kv.block_pool import BlockPool, Holder
from tandem.sched.phases.job_admission import ReservedCapacity, blocks_for, num_seats
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.phases.ration import admissible
from tandem.sched.state.limits import SchedulerLimits, may_offer
from tandem.sched.state.schedule_result import PrefillStarted, PullAllocated, SequenceStarted
from tandem.sched.state.sequence import Sequence, Status
from tandem.sched.state.sequence_queue import OrderedQueue


class Admitter:
    """Moves sequences between the scheduler's queues. `promised` holds the blocks that were promised to each pull that
    waits."""

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        waiting: OrderedQueue,
        running: OrderedQueue,
        pulling: dict[JobKey, Sequence],
        promised: dict[SeqId, int],
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._waiting = waiting
        self._running = running
        self._pulling = pulling
        self._promised = promised

    @property
    def num_seats(self) -> int:
        """Those that nobody has."""
        return self._limits.max_num_seqs - len(self._running) - len(self._pulling)

    def commitments(self) -> ReservedCapacity:
        """What a job that comes now must find room beside."""
        pulls = (seq for seq in self._waiting if seq.is_pull)
        seated = chain(self._running, self._pulling.values(), pulls)
        return ReservedCapacity(
            num_blocks=self._pool.num_blocks,
            num_leased=self._pool.num_leased,
            num_seqs=sum(num_seats(seq.job, self._limits) for seq in seated),
            promises=tuple(self._promised.values()),
            prefills=tuple(self._num_blocks(seq) for seq in self._waiting if isinstance(seq.job, PrefillJob)),
        )

    def admit(self, draft: PlanBuilder) -> None:
        """Start waiting sequences in order, those with a share. The first that finds no room ends it, so that none is
        overtaken for ever. What waits for another worker holds nobody back.

        Leases end only when their consumers get room, so what waits for them must not hold back a pull: a prefill that
        may not be offered yet holds back other prefills, anything else that is too large all but pulls.
        """
        may_compute = may_prefill = True
        for seq in list(self._waiting):
            if not self.num_seats:
                return
            if not seq.may_start:
                continue
            if seq.is_pull:
                if not self._grant_pull(seq, draft):
                    return
            elif not (may_compute and draft.has_share(seq)) or (isinstance(seq.job, PrefillJob) and not may_prefill):
                continue
            elif isinstance(seq.job, PrefillJob) and not self._may_offer(seq):
                may_prefill = False
            elif not self._start(seq, draft):
                if self._num_blocks(seq) <= self._pool.num_blocks - self._pool.num_leased:
                    return
                may_compute = False

    def _start(self, seq: Sequence, draft: PlanBuilder) -> bool:
        hashes = seq.reusable(self._pool.block_size)
        cached = self._pool.count_hits(hashes) * self._pool.block_size
        if draft.chunk_of(seq, len(seq.tokens) - cached) == 0:
            return False
        if not self._take_blocks(seq, hashes, self._num_blocks(seq), spare=len(self._running)):
            return False
        if not seq.was_started:
            seq.num_cached = cached
        seq.num_computed = cached
        seq.was_started = True
        seq.status = Status.RUNNING
        self._running.add(seq)
        draft.starts.append(SequenceStarted(seq.key, seq.num_cached))
        if isinstance(seq.job, PrefillJob):
            self._pool.retain(seq.table.ids(), Holder.LEASE)
            draft.offers.append(PrefillStarted(seq.key, seq.table.ids()))
        draft.add(seq)
        return True

    def _grant_pull(self, seq: Sequence, draft: PlanBuilder) -> bool:
        hashes = seq.reusable(self._pool.block_size)
        num_hits = self._pool.count_hits(hashes)
        if not self._take_blocks(seq, hashes, self._promised[seq.id], spare=0):
            return False
        del self._promised[seq.id]
        seq.was_started = True
        seq.status = Status.PULLING
        self._pulling[seq.key] = seq
        draft.pulls.append(PullAllocated(seq.key, seq.table.ids(), num_hits, self._num_blocks(seq)))
        return True

    def _take_blocks(self, seq: Sequence, hashes: list[BlockHash], num_blocks: int, spare: int) -> bool:
        """Fill an empty table, leaving `spare` blocks for running sequences to grow into."""
        if self._pool.num_free_needed(hashes, num_blocks) + spare > self._pool.num_free:
            return False
        self._waiting.remove(seq)
        self._pool.share(seq.table, hashes)
        grown = self._pool.grow(seq.table, num_blocks)
        assert grown, "room was counted"
        return True

    def _may_offer(self, seq: Sequence) -> bool:
        need, largest = self._num_blocks(seq), max(self._promised.values(), default=0)
        return may_offer(need, self._pool.num_leased, self._pool.num_blocks, largest)

    def startable(self) -> Iterator[Sequence]:
        """Those that may be given a share of the step: there are seats for them."""
        largest = max(self._promised.values(), default=0)
        return islice(admissible(self._waiting, self._pool, largest), self.num_seats)

    def _num_blocks(self, seq: Sequence) -> int:
        return blocks_for(len(seq.tokens), self._pool.block_size)
