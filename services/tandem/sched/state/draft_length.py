"""How far one sequence guesses ahead, learnt from what became of its guesses; never changes what is drawn."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.sched.state.ngram_proposer import Proposer

FIRST_LENGTH = 4
MAX_PAUSE = 32
"""Steps. A sequence whose guesses are never right pays for one row in so many steps."""


class AdaptiveDraft:
    """A proposer and how much it is trusted.

    The length doubles when all guesses were right and halves when most were wrong. After guesses of which none was
    right it pauses, for twice as many steps each time in a row: text that does not repeat itself costs next to nothing.
    """

    def __init__(self, proposer: Proposer, max_length: int) -> None:
        self.length = min(FIRST_LENGTH, max_length)
        self._proposer = proposer
        self._max_length = max_length
        self._num_misses = 0
        self._pause = 0

    def draft(self, tokens: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """At most `max_tokens` guesses for the next step."""
        max_tokens = min(max_tokens, self.length)
        if self._pause or max_tokens <= 0:
            self._pause = max(0, self._pause - 1)
            return ()
        return self._proposer.propose(tokens, max_tokens)[:max_tokens]

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """What became of the last guesses; at least one was made."""
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
        return f"<drafter {self.length} of {self._max_length}, pause {self._pause}, {self._proposer!r}>"
