"""Build one plan: its slices, the blocks that they need, and the preemptions that free those blocks.

Sequences are planned in order. A sequence that needs a block when none is free preempts the youngest sequence that this
plan has not reached, that no open plan names, and whose blocks no other worker may read.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.core.ids import BlockId, JobKey, SeqId
from tandem.core.request import PrefillJob
from tandem.kv.block_pool import BlockPool
from tandem.sched.budget.prefill_sharing import PendingPrefill, redistribute, split_budget
from tandem.sched.budget.step_budget import PrefillBudget
from tandem.sched.phases.fork import shares_tail
from tandem.sched.state.block_needs import blocks_for
from tandem.sched.state.limits import SchedulerLimits, chunk_size
from tandem.sched.state.schedule_result import PrefillStarted, PullAllocated, ScheduleResult, SequenceStarted
from tandem.sched.state.sequence import MigrationState, Sequence, Status
from tandem.sched.state.sequence_queue import OrderedQueue
from tandem.sched.state.step_plan import ScheduledSlice, StepPlan

MAX_DIGESTS = 64
"""Limit on the blocks of migrating sequences and prefix fetches that one step digests; a backlog is digested in
parts."""


class PlanBuilder:
    """Own a plan while `Scheduler.plan` builds it.

    `budget` is the rest of the step's token budget; `slices` keeps the order in which they were planned.
    """

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, running: OrderedQueue, waiting: OrderedQueue) -> None:
        self.budget = limits.max_num_batched_tokens
        self.slices: dict[SeqId, ScheduledSlice] = {}
        self.pulls: list[PullAllocated] = []
        self.offers: list[PrefillStarted] = []
        self.starts: list[SequenceStarted] = []
        self.copies: list[tuple[BlockId, BlockId]] = []
        self.num_preempted = 0
        self.has_prefill = False
        self.num_digests_left = MAX_DIGESTS
        self._chunks: list[tuple[JobKey, int]] = []
        self._prompts: dict[SeqId, PendingPrefill] = {}
        self._prefill_budget = PrefillBudget(self.budget)
        self._prefill_tokens: dict[SeqId, int] | None = None
        self.pool = pool
        self.limits = limits
        self._running = running
        self._waiting = waiting

    def split_prefill_budget(self, prompts: Iterable[PendingPrefill], prefill_budget: PrefillBudget) -> None:
        """Split a prefill budget among prompts; from now on a prompt without a part computes nothing in this plan."""
        self._prompts = {prompt.seq: prompt for prompt in prompts}
        self._prefill_budget = prefill_budget
        self._prefill_tokens = split_budget(list(self._prompts.values()), prefill_budget)

    def has_prefill_budget(self, seq: Sequence) -> bool:
        """Return whether a sequence has a part of the prefill budget, or the budget is not split."""
        return self._prefill_tokens is None or seq.id in self._prefill_tokens

    def add_started(self, started: Iterable[Sequence]) -> None:
        """Plan the prompts that run already, with the budget that waiting prompts did not use."""
        if self._prefill_tokens is not None:
            left = self._prefill_budget
            for prompt in self._prompts.values():
                if prompt.is_waiting and (piece := self.slices.get(prompt.seq)) is not None:
                    left = left.less(piece.start, piece.num_tokens)
            running = [prompt for prompt in self._prompts.values() if not prompt.is_waiting]
            self._prefill_tokens = redistribute(running, self._prefill_tokens, left)
        for seq in started:
            self.add(seq)

    def chunk_of(self, seq: Sequence, num_remaining: int) -> int:
        """Return how many of a sequence's remaining tokens this step may take; a decode needs no part of the prefill
        budget."""
        size = chunk_size(num_remaining, self.budget, self.has_prefill, self.limits)
        return (
            size
            if self._prefill_tokens is None or num_remaining <= 1
            else min(size, self._prefill_tokens.get(seq.id, 0))
        )

    def add(self, seq: Sequence) -> None:
        """Plan the next chunk or token of a running sequence, if budget and blocks allow."""
        num_tokens = self.chunk_of(seq, seq.num_remaining)
        if num_tokens == 0:
            return
        start, stop = seq.num_planned, seq.num_planned + num_tokens
        num_blocks = blocks_for(stop, self.pool.block_size)
        if not self._make_room(seq, num_blocks):
            return
        blocks = seq.table.ids(num_blocks)
        sampling = seq.sampling_at(stop)
        digest_blocks = self._to_digest(seq, stop, blocks, samples=sampling is not None)
        self.slices[seq.id] = ScheduledSlice(
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
        self.budget = max(0, self.budget - num_tokens)
        self.has_prefill |= num_tokens > 1
        if num_tokens > 1 or sampling is None:
            self._chunks.append((seq.key, num_tokens))
        seq.num_in_flight += num_tokens
        seq.num_pending += sampling is not None
        seq.num_open_plans += 1

    def build(self, step: StepPlan | None, pulls: Iterable[PullAllocated]) -> ScheduleResult:
        """Return the result of planning, with the plan `step` and the pulls that may begin."""
        return ScheduleResult(
            step, tuple(pulls), tuple(self.offers), self.num_preempted, tuple(self.starts), tuple(self._chunks)
        )  # fmt: skip

    def _to_digest(
        self, seq: Sequence, stop: int, blocks: tuple[BlockId, ...], *, samples: bool
    ) -> tuple[BlockId, ...]:
        """Return the blocks to digest because another worker may read them after this slice.

        The partly filled last block counts when a prompt ends, or with the last token of a sequence that migrates.
        """
        is_prefill = isinstance(seq.job, PrefillJob)
        if not is_prefill and seq.migration_state is MigrationState.NONE:
            return ()
        ends = stop == len(seq.tokens) if is_prefill else samples and self._freeze(seq, len(blocks))
        if not self.limits.digest_handoffs:
            return ()
        num_complete = len(blocks) if ends else stop // self.pool.block_size
        if not is_prefill:
            num_complete = min(num_complete, seq.num_digested + self.num_digests_left)
            self.num_digests_left -= max(0, num_complete - seq.num_digested)
        fresh = blocks[seq.num_digested : num_complete]
        seq.num_digested = max(seq.num_digested, num_complete)
        return fresh

    def _freeze(self, seq: Sequence, num_blocks: int) -> bool:
        """Freeze a migrating sequence if the token of this slice can be its last one here: the blocks that are left can
        be digested with it."""
        num_left = num_blocks - seq.num_digested if self.limits.digest_handoffs else 0
        if seq.migration_state is not MigrationState.FINALIZING or num_left > self.num_digests_left:
            return False
        seq.migration_state = MigrationState.FROZEN
        return True

    def _make_room(self, seq: Sequence, num_blocks: int) -> bool:
        """Grow a table and make its last block exclusive. Preempts sequences for it, the youngest first, none older
        than `seq`, and possibly `seq` itself. Returns whether the room was found."""
        while not (self.pool.grow(seq.table, num_blocks) and self._own_tail(seq)):
            victim = self._victim(seq)
            if victim is None:
                return False
            self._preempt(victim)
            self.num_preempted += 1
            if victim is seq:
                return False
        return True

    def _own_tail(self, seq: Sequence) -> bool:
        """Copy the block that the sequence writes next if it is shared; the last holder of a block keeps it without a
        copy. Returns False when there is no free block."""
        if not shares_tail(seq, self.pool):
            return True
        copy = self.pool.make_exclusive(seq.table, seq.num_planned // self.pool.block_size)
        if copy is not None:
            self.copies.append(copy)
        return copy is not None

    def _victim(self, seq: Sequence) -> Sequence | None:
        for candidate in reversed(self._running):
            if candidate.order < seq.order:
                return None
            offered = isinstance(candidate.job, PrefillJob) or candidate.migration_state is not MigrationState.NONE
            if candidate.num_open_plans == 0 and candidate.id not in self.slices and not offered:
                return candidate
        return None

    def _preempt(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self.pool.release(seq.table)
        seq.num_computed = 0
        seq.status = Status.WAITING
        self._waiting.add(seq)
