"""Start waiting sequences: give them seats and their first blocks.

Preemption and the end of sequences are decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from tandem.core.ids import BlockHash, JobKey, SeqId
from tandem.core.request import PrefillJob
from tandem.kv.block_pool import BlockPool, Holder
from tandem.sched.phases.job_admission import ReservedCapacity
from tandem.sched.state.block_needs import blocks_for, num_seats
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.phases.prefill_budget import admissible
from tandem.sched.state.limits import SchedulerLimits, may_offer
from tandem.sched.state.schedule_result import PrefillStarted, PullAllocated, SequenceStarted
from tandem.sched.state.sequence import Sequence, Status
from tandem.sched.state.sequence_queue import OrderedQueue


class Admitter:
    """Move sequences from the waiting queue to the running queue or to the pulls. `reserved_blocks` maps each waiting
    pull to its number of reserved blocks."""

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        waiting: OrderedQueue,
        running: OrderedQueue,
        pulling: dict[JobKey, Sequence],
        reserved_blocks: dict[SeqId, int],
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._waiting = waiting
        self._running = running
        self._pulling = pulling
        self._reserved_blocks = reserved_blocks

    @property
    def num_free_seats(self) -> int:
        """Count the free seats (of `max_num_seqs`)."""
        return self._limits.max_num_seqs - len(self._running) - len(self._pulling)

    def reserved_capacity(self) -> ReservedCapacity:
        """Return what the accepted jobs hold or have reserved; a new job must fit beside it."""
        pulls = (seq for seq in self._waiting if seq.is_pull)
        seated = chain(self._running, self._pulling.values(), pulls)
        return ReservedCapacity(
            num_blocks=self._pool.num_blocks,
            num_leased=self._pool.num_leased,
            num_seqs=sum(num_seats(seq.job, self._limits) for seq in seated),
            reservations=tuple(self._reserved_blocks.values()),
            prefills=tuple(self._num_blocks(seq) for seq in self._waiting if isinstance(seq.job, PrefillJob)),
        )

    def admit(self, builder: PlanBuilder) -> None:
        """Start waiting sequences that have a prefill budget, in order. The first one without room ends admission, so
        that no sequence is overtaken for ever. Sequences that wait for another worker do not hold back others.

        Leases end only when their consumers get room, so a sequence that waits for leases must not hold back a pull: a
        prefill that may not lease its blocks yet holds back other prefills, and any other sequence that is too large
        holds back all but pulls.
        """
        may_compute = True
        may_prefill = True
        for seq in list(self._waiting):
            if not self.num_free_seats:
                return
            if not seq.may_start:
                continue
            if seq.is_pull:
                if not self._grant_pull(seq, builder):
                    return
            elif not (may_compute and builder.has_prefill_budget(seq)) or (
                isinstance(seq.job, PrefillJob) and not may_prefill
            ):
                continue
            elif isinstance(seq.job, PrefillJob) and not self._may_offer(seq):
                may_prefill = False
            elif not self._start(seq, builder):
                if self._num_blocks(seq) <= self._pool.num_blocks - self._pool.num_leased:
                    return
                may_compute = False

    def _start(self, seq: Sequence, builder: PlanBuilder) -> bool:
        hashes = seq.reusable(self._pool.block_size)
        cached = self._pool.count_hits(hashes) * self._pool.block_size
        if builder.chunk_of(seq, len(seq.tokens) - cached) == 0:
            return False
        if not self._take_blocks(seq, hashes, self._num_blocks(seq), spare=len(self._running)):
            return False
        if not seq.was_started:
            seq.num_cached = cached
        seq.num_computed = cached
        seq.was_started = True
        seq.status = Status.RUNNING
        self._running.add(seq)
        builder.starts.append(SequenceStarted(seq.key, seq.num_cached))
        if isinstance(seq.job, PrefillJob):
            self._pool.retain(seq.table.ids(), Holder.LEASE)
            builder.offers.append(PrefillStarted(seq.key, seq.table.ids()))
        builder.add(seq)
        return True

    def _grant_pull(self, seq: Sequence, builder: PlanBuilder) -> bool:
        hashes = seq.reusable(self._pool.block_size)
        num_hits = self._pool.count_hits(hashes)
        if not self._take_blocks(seq, hashes, self._reserved_blocks[seq.id], spare=0):
            return False
        del self._reserved_blocks[seq.id]
        seq.was_started = True
        seq.status = Status.PULLING
        self._pulling[seq.key] = seq
        builder.pulls.append(PullAllocated(seq.key, seq.table.ids(), num_hits, self._num_blocks(seq)))
        return True

    def _take_blocks(self, seq: Sequence, hashes: list[BlockHash], num_blocks: int, spare: int) -> bool:
        """Fill the empty table of a sequence and remove it from the queue, leaving `spare` free blocks into which
        running sequences can grow. Returns False, without a change, when there are too few."""
        if self._pool.num_free_needed(hashes, num_blocks) + spare > self._pool.num_free:
            return False
        self._waiting.remove(seq)
        self._pool.share(seq.table, hashes)
        grown = self._pool.grow(seq.table, num_blocks)
        assert grown, "room was counted"
        return True

    def _may_offer(self, seq: Sequence) -> bool:
        need, largest = self._num_blocks(seq), max(self._reserved_blocks.values(), default=0)
        return may_offer(need, self._pool.num_leased, self._pool.num_blocks, largest)

    def startable(self) -> Iterator[Sequence]:
        """Yield the waiting sequences that may get a part of the step's prefill budget: no more than there are free
        seats."""
        largest = max(self._reserved_blocks.values(), default=0)
        return islice(admissible(self._waiting, self._pool, largest), self.num_free_seats)

    def _num_blocks(self, seq: Sequence) -> int:
        return blocks_for(len(seq.tokens), self._pool.block_size)
