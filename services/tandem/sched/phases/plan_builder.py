"""Collect the parts of one plan while it is built: its slices, copies and starts, and what is left of its token
budgets.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.core.events import Preempted
from tandem.core.ids import BlockId, JobKey, SeqId
from tandem.sched.budget.prefill_sharing import PendingPrefill, redistribute, split_budget
from tandem.sched.budget.step_sizer import PrefillBudget
from tandem.sched.state.limits import SchedulerLimits, chunk_size
from tandem.sched.state.schedule_result import PullAllocated, ScheduleResult, SequenceStarted
from tandem.sched.state.sequence import Sequence
from tandem.sched.state.step_plan import ScheduledSlice, StepPlan

MAX_DIGESTS = 64
"""Limit on the blocks of migrating sequences and prefix fetches that one step digests; a backlog is digested in
parts."""


class PlanBuilder:
    """Collect the parts of a plan while `Scheduler.plan` builds it, and return them with `build`.

    - `budget`: tokens that the step may still compute; `slices`: the slice of each sequence, in the order of planning.
    - `starts`: sequences that begin to compute; `pulls`: pulls that got blocks.
    - `num_preempted`: number of sequences that were preempted because no block was free; `yielded`: ids of the
      sequences that were preempted for others of more urgent lanes; `preempted`: one entry for each sequence of both
      kinds that has output tokens already.
    - `copies`: pairs (source, target) of blocks to copy before the step.
    - `has_prefill`: whether a prompt chunk is planned; `num_digests_left`: number of blocks that the step may still
      digest.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.budget = limits.max_num_batched_tokens
        self.slices: dict[SeqId, ScheduledSlice] = {}
        self.pulls: list[PullAllocated] = []
        self.starts: list[SequenceStarted] = []
        self.copies: list[tuple[BlockId, BlockId]] = []
        self.num_preempted = 0
        self.yielded: set[SeqId] = set()
        self.preempted: list[Preempted] = []
        self.has_prefill = False
        self.num_digests_left = MAX_DIGESTS
        self._chunks: list[tuple[JobKey, int]] = []
        self._prompts: dict[SeqId, PendingPrefill] = {}
        self._prefill_budget = PrefillBudget(self.budget)
        self._prefill_tokens: dict[SeqId, int] | None = None
        self._limits = limits

    def split_prefill_budget(self, prompts: Iterable[PendingPrefill], prefill_budget: PrefillBudget) -> None:
        """Split a prefill budget among prompts. In this plan each prompt computes at most its part, and a prompt
        without a part computes nothing."""
        self._prompts = {prompt.seq: prompt for prompt in prompts}
        self._prefill_budget = prefill_budget
        self._prefill_tokens = split_budget(list(self._prompts.values()), prefill_budget)

    def has_prefill_budget(self, seq: Sequence) -> bool:
        """Return whether a sequence got a part of the prefill budget; True as long as the budget has not been split."""
        return self._prefill_tokens is None or seq.id in self._prefill_tokens

    def redistribute_prefill_budget(self) -> None:
        """Give the budget that waiting prompts did not use to prompts that run already. Does nothing if the budget was
        not split."""
        if self._prefill_tokens is None:
            return
        left = self._prefill_budget
        for prompt in self._prompts.values():
            if prompt.is_waiting and (piece := self.slices.get(prompt.seq)) is not None:
                left = left.less(piece.start, piece.num_tokens)
        running = [prompt for prompt in self._prompts.values() if not prompt.is_waiting]
        self._prefill_tokens = redistribute(running, self._prefill_tokens, left)

    def chunk_of(self, seq: Sequence, num_remaining: int) -> int:
        """Return how many of a sequence's `num_remaining` tokens this step may compute; 0: none. Once the prefill
        budget is split, a prompt is limited to its part of it; a decode is not."""
        size = chunk_size(num_remaining, self.budget, self.has_prefill, self._limits)
        if self._prefill_tokens is None or num_remaining <= 1:
            return size
        return min(size, self._prefill_tokens.get(seq.id, 0))

    def add(self, seq: Sequence, piece: ScheduledSlice) -> None:
        """Add the slice of a sequence and subtract its tokens from the budget."""
        self.slices[seq.id] = piece
        self.budget = max(0, self.budget - piece.num_tokens)
        self.has_prefill |= piece.num_tokens > 1
        if piece.num_tokens > 1 or piece.sampling is None:
            self._chunks.append((seq.key, piece.num_tokens))

    def note_yield(self, seq: Sequence) -> None:
        """Record that a sequence was preempted for one of a more urgent lane."""
        self.yielded.add(seq.id)
        self._note_choice(seq)

    def note_preemption(self, seq: Sequence) -> None:
        """Record that a sequence was preempted because no block was free."""
        self.num_preempted += 1
        self._note_choice(seq)

    def build(self, step: StepPlan | None) -> ScheduleResult:
        """Return everything that planning decided. `step`: the finished plan; None where there is nothing to
        compute."""
        return ScheduleResult(
            step,
            tuple(self.pulls),
            self.num_preempted,
            len(self.yielded),
            starts=tuple(self.starts),
            chunks=tuple(self._chunks),
            preempted=tuple(self.preempted),
        )

    def _note_choice(self, seq: Sequence) -> None:
        if seq.num_output:
            self.preempted.append(Preempted(seq.key, seq.num_output))
