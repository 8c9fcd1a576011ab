"""Extend planned decodes of a step by draft tokens, using only blocks and budget that no other sequence needs.

Speculation is exact: the model samples the token of every guessed position with that position's own random numbers, and
a guess counts only when it equals the sampled token. (Leviathan et al., ICML 2023, accept by a ratio of probabilities
instead, which is exact in distribution only.) Speculation is optional work, so it comes last in a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tandem.core.request import PrefillJob
from tandem.kv.block_pool import BlockPool
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.state.draft_length import AdaptiveDraft
from tandem.sched.state.limits import blocks_for
from tandem.sched.state.ngram_proposer import Proposer
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.state.sequence import MigrationState, Sequence


class Speculation:
    """Add guessed (draft) tokens to the decodes of a plan, and adapt their number to how many turn out right.

    - `new_proposer`: makes the source of guesses for a sequence.
    - `num_tokens`: most guesses of one sequence in a step.
    - `max_batch_tokens`: most decodes and guesses of all sequences together in a step. Set it to the number of tokens
      from which on each further one makes a step longer. Up to this number a step takes the time of reading the
      weights, and guesses are free.
    - `num_drafted`, `num_accepted`: number of all guesses, and of the right ones, since the start.

    Raises ValueError for limits below 1.
    """

    def __init__(self, new_proposer: Callable[[], Proposer], *, num_tokens: int, max_batch_tokens: int) -> None:
        if num_tokens < 1 or max_batch_tokens < 1:
            raise ValueError(f"{num_tokens} guesses of a sequence, {max_batch_tokens} rows of a step")
        self.num_drafted = 0
        self.num_accepted = 0
        self._new_proposer = new_proposer
        self._num_tokens = num_tokens
        self._max_batch_tokens = max_batch_tokens

    def extend(self, state: SchedulerState, builder: PlanBuilder) -> None:
        """Append guesses to the decodes of a plan that is complete but for them, oldest sequence first, in about equal
        numbers.

        The KV of guesses is stored in the sequences' own blocks and in free ones that no other sequence needs; nothing
        is preempted.
        """
        num_spare = _num_spare_blocks(state)
        num_decodes = sum(1 for piece in builder.slices.values() if piece.num_tokens == 1)
        room = min(builder.budget, self._max_batch_tokens - num_decodes)
        able = [seq for seq in state.running if _may_draft(seq, builder)] if room > 0 else []
        for place, seq in enumerate(able):
            share = -(-room // (len(able) - place))
            num_slots = (len(seq.table) + max(0, num_spare)) * state.pool.block_size - builder.slices[seq.id].stop
            guesses = self._adaptive_draft(seq).draft(seq.tokens, min(share, num_slots, _num_left(seq)))
            if guesses:
                room -= len(guesses)
                num_spare -= _append(builder, state.pool, seq, guesses)

    def learn(self, seq: Sequence, num_drafted: int, num_sampled: int) -> None:
        """Adapt the number of guesses of a sequence to the result of a slice that had `num_drafted` guesses; do nothing
        if it had none.

        `num_sampled`: number of tokens that the slice sampled, which is one more than the number of right guesses.
        """
        if num_drafted:
            num_accepted = min(num_drafted, max(0, num_sampled - 1))
            self.num_drafted += num_drafted
            self.num_accepted += num_accepted
            self._adaptive_draft(seq).learn(num_drafted, num_accepted)

    def _adaptive_draft(self, seq: Sequence) -> AdaptiveDraft:
        if seq.adaptive_draft is None:
            seq.adaptive_draft = AdaptiveDraft(self._new_proposer(), self._num_tokens)
        return seq.adaptive_draft

    def __repr__(self) -> str:
        return f"<speculation {self.num_accepted} of {self.num_drafted} guesses right>"


def _num_spare_blocks(state: SchedulerState) -> int:
    """Count the free blocks that neither running sequences need for their next block nor waiting sequences for their
    start."""
    beginning = sum(blocks_for(len(seq.tokens), state.pool.block_size) + 1 for seq in state.waiting)
    return state.pool.num_free - len(state.running) - beginning


def _may_draft(seq: Sequence, builder: PlanBuilder) -> bool:
    """Return whether the slice of a sequence is a decode, with a known token, that may sample more than one token."""
    piece = builder.slices.get(seq.id)
    is_decode = piece is not None and piece.num_tokens == 1 and piece.sampling is not None and not piece.chained
    samples_once = isinstance(seq.job, PrefillJob) or seq.migration_state is MigrationState.FROZEN or seq.is_unforked
    return is_decode and not samples_once and _num_left(seq) > 0


def _num_left(seq: Sequence) -> int:
    """Count the tokens that may be sampled beyond those that open plans already sample."""
    return seq.job.request.sampling.max_tokens - seq.num_output - seq.num_pending


def _append(builder: PlanBuilder, pool: BlockPool, seq: Sequence, guesses: tuple[int, ...]) -> int:
    """Add guesses to a slice; return the number of blocks allocated. The sequence keeps the blocks if the guesses fail,
    since its next tokens need them."""
    piece, num_before = builder.slices[seq.id], len(seq.table)
    num_blocks = blocks_for(piece.stop + len(guesses), pool.block_size)
    grown = pool.grow(seq.table, num_blocks)
    assert grown, "room was counted"
    builder.slices[seq.id] = replace(
        piece,
        num_tokens=piece.num_tokens + len(guesses),
        tokens=piece.tokens + guesses,
        blocks=seq.table.ids(num_blocks),
        num_drafted=len(guesses),
    )
    builder.budget -= len(guesses)
    seq.num_drafted = len(guesses)
    return len(seq.table) - num_before
