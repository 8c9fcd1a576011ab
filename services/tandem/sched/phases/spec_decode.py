"""Which planned decodes of a step also try guesses, and how many; never takes room or budget that others need.

Speculation is exact: the model draws the token of every guessed position with that position's own random numbers, and
a guess counts only when it equals what was drawn. (Leviathan et al., ICML 2023, accept by a ratio of probabilities
instead, which is exact in distribution only.) So it is optional work, and comes last in a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from tandem.core.request import PrefillJob
from tandem.kv.block_pool import BlockPool
from tandem.sched.phases.job_admission import blocks_for
from tandem.sched.phases.plan_builder import PlanBuilder
from tandem.sched.state.draft_length import AdaptiveDraft
from tandem.sched.state.ngram_proposer import Proposer
from tandem.sched.state.sequence import MigrationState, Sequence


class Speculation:
    """`num_tokens` bounds the guesses of one sequence in a step; `max_batch_tokens` the decodes and guesses of all.

    Rows beyond one ride along only while a step waits for the weights to be read: the second bound is where a step
    begins to take longer with every row. `num_drafted` and `num_accepted` count all guesses since the start.
    """

    def __init__(self, new_proposer: Callable[[], Proposer], *, num_tokens: int, max_batch_tokens: int) -> None:
        if num_tokens < 1 or max_batch_tokens < 1:
            raise ValueError(f"{num_tokens} guesses of a sequence, {max_batch_tokens} rows of a step")
        self.num_drafted = 0
        self.num_accepted = 0
        self._new_proposer = new_proposer
        self._num_tokens = num_tokens
        self._max_batch_tokens = max_batch_tokens

    def extend(self, draft: PlanBuilder, pool: BlockPool, running: Iterable[Sequence], num_spare: int) -> None:
        """Append guesses to decodes of a plan that is otherwise complete, oldest first, in about equal shares.

        They lie in the sequences' own blocks and in up to `num_spare_blocks` free ones.
        """
        num_decodes = sum(1 for piece in draft.slices.values() if piece.num_tokens == 1)
        room = min(draft.budget, self._max_batch_tokens - num_decodes)
        able = [seq for seq in running if _may_draft(seq, draft)] if room > 0 else []
        for place, seq in enumerate(able):
            share = -(-room // (len(able) - place))
            num_slots = (len(seq.table) + max(0, num_spare)) * pool.block_size - draft.slices[seq.id].stop
            guesses = self._drafter(seq).draft(seq.tokens, min(share, num_slots, _num_left(seq)))
            if guesses:
                room -= len(guesses)
                num_spare -= _append(draft, pool, seq, guesses)

    def learn(self, seq: Sequence, num_drafted: int, num_sampled: int) -> None:
        """A slice with so many guesses yielded `num_sampled` tokens, one more than were right."""
        if num_drafted:
            num_accepted = min(num_drafted, max(0, num_sampled - 1))
            self.num_drafted += num_drafted
            self.num_accepted += num_accepted
            self._drafter(seq).learn(num_drafted, num_accepted)

    def _drafter(self, seq: Sequence) -> AdaptiveDraft:
        if seq.drafter is None:
            seq.drafter = AdaptiveDraft(self._new_proposer(), self._num_tokens)
        return seq.drafter

    def __repr__(self) -> str:
        return f"<speculation {self.num_accepted} of {self.num_drafted} guesses right>"


def num_spare_blocks(pool: BlockPool, running: Collection[Sequence], waiting: Iterable[Sequence]) -> int:
    """Free blocks that neither running sequences grow into next nor waiting ones begin with."""
    beginning = sum(blocks_for(len(seq.tokens), pool.block_size) + 1 for seq in waiting)
    return pool.num_free - len(running) - beginning


def _may_draft(seq: Sequence, draft: PlanBuilder) -> bool:
    """A decode whose tokens are all known. A Prefill draws one token and no more, and so does what leaves with it;
    what draws several of one row guesses none."""
    piece = draft.slices.get(seq.id)
    is_decode = piece is not None and piece.num_tokens == 1 and piece.sampling is not None and not piece.chained
    draws_one = isinstance(seq.job, PrefillJob) or seq.migration_state is MigrationState.FROZEN or seq.is_undivided
    return is_decode and not draws_one and _num_left(seq) > 0


def _num_left(seq: Sequence) -> int:
    """Tokens that may be drawn beyond those that open plans draw already."""
    return seq.job.request.sampling.max_tokens - seq.num_output - seq.num_pending


def _append(draft: PlanBuilder, pool: BlockPool, seq: Sequence, guesses: tuple[int, ...]) -> int:
    """Returns how many blocks the table grew by. It keeps them when guesses fail: the next tokens need them."""
    piece, num_before = draft.slices[seq.id], len(seq.table)
    num_blocks = blocks_for(piece.stop + len(guesses), pool.block_size)
    grown = pool.grow(seq.table, num_blocks)
    assert grown, "room was counted"
    draft.slices[seq.id] = replace(
        piece,
        num_tokens=piece.num_tokens + len(guesses),
        tokens=piece.tokens + guesses,
        blocks=seq.table.ids(num_blocks),
        num_drafted=len(guesses),
    )
    draft.budget -= len(guesses)
    seq.num_drafted = len(guesses)
    return len(seq.table) - num_before
