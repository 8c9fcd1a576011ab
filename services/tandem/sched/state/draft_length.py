"""Adapt the number of draft tokens (guesses) of one sequence to how many of its earlier guesses were accepted.

The draft length changes the speed of a sequence only: which tokens are sampled does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.sched.state.ngram_proposer import Proposer

FIRST_LENGTH = 4
"""Tokens drafted in the first step."""
MAX_PAUSE = 32
"""Longest pause, in steps. A sequence whose guesses are always wrong pays for one extra row once in so many steps."""


class AdaptiveDraft:
    """Choose how many tokens to draft for one sequence in each step, by how many of its earlier guesses were right.

    The number doubles when all guesses of a step were right, and halves when fewer than half were. From the second step
    in a row without a right guess on, drafting pauses for some steps; each further such step about doubles the pause.
    Text without repetition thus costs next to nothing. `proposer`: source of the guesses. `max_length`: most guesses
    per step.
    """

    def __init__(self, proposer: Proposer, max_length: int) -> None:
        self.length = min(FIRST_LENGTH, max_length)
        self._proposer = proposer
        self._max_length = max_length
        self._num_misses = 0
        self._pause = 0

    def draft(self, tokens: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Return at most `max_tokens` guesses of the token ids that follow `tokens`, which are all known tokens of the
        sequence. The result is empty during a pause or where there is no guess."""
        max_tokens = min(max_tokens, self.length)
        if self._pause or max_tokens <= 0:
            self._pause = max(0, self._pause - 1)
            return ()
        return self._proposer.propose(tokens, max_tokens)[:max_tokens]

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Record that `num_accepted` of the last `num_drafted` guesses were right, and adapt the number of guesses.
        `num_drafted` is at least 1."""
        if num_accepted == num_drafted:
            self.length = min(2 * self.length, self._max_length)
        elif 2 * num_accepted < num_drafted:
            self.length = max(1, self.length // 2)
        if num_accepted:
            self._num_misses = 0
        else:
            self._pause = min(2**self._num_misses - 1, MAX_PAUSE)
            self._num_misses += 1

    def __repr__(self) -> str:
        return f"<draft length {self.length} of {self._max_length}, pause {self._pause}, {self._proposer!r}>"
