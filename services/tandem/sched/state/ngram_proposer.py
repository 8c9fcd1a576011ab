"""Guesses of how a sequence goes on, made from its tokens alone; never decides how many are tried or which are right.

A guess costs a row of a step and can change nothing else: a guessed token counts only when the model draws it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol


class Proposer(Protocol):
    """Guesses for one sequence, and may remember what it was shown of it.

    Whatever is cheap, pure and needs nothing but tokens fits here. A draft model does not: its guesses come from a
    batched call on the executor's thread, from the KV of a group of its own. There the plan leaves a slice's guesses
    open (`num_drafted` of them, no ids, as a chained slice leaves its token) and the executor fills them in before it
    verifies them; all that the scheduler does with a guess (how many, which room, what is accepted) stays the same.
    """

    def propose(self, tokens: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Up to `max_tokens` ids that may follow `tokens`, or none. From call to call `tokens` only grow."""
        ...


class NgramProposer:
    """What followed the last few tokens when they came before, in prompt or output.

    "Prompt lookup decoding" (A. Saxena, 2023; the `ngram` method of vLLM). Of the most recent `MAX_CANDIDATES` earlier
    places whose last `min_n` tokens are those of the sequence, the one that agrees over the most tokens, up to
    `max_n`, wins; of equals the most recent. Where the copy reaches the sequence's end it goes on with itself, as
    LZ77 does, so that a loop is continued for as long as is asked.

    The index is a hash chain over `min_n`-grams, as zlib's: one entry per different n-gram (its last place) and four
    bytes per token (the place before). A token costs O(1) to add and at most MAX_CANDIDATES x max_n comparisons to
    look up.
    """

    MAX_CANDIDATES = 32

    def __init__(self, min_n: int, max_n: int) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"n-grams of {min_n} to {max_n} tokens")
        self._min_n = min_n
        self._max_n = max_n
        # A place is the index of the token after an n-gram; the chain of an n-gram leads to ever earlier places.
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier = array("i", [-1] * min_n)

    def propose(self, tokens: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """As `Proposer.propose`. Raises ValueError when `tokens` are fewer than those seen before."""
        self._add(tokens)
        place = self._best_place(tokens)
        if place < 0 or max_tokens <= 0:
            return ()
        known = list(tokens[place : place + max_tokens])
        period = len(tokens) - place
        while len(known) < max_tokens:
            known.append(known[len(known) - period])
        return tuple(known)

    def _add(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that a known token follows; the sequence's own last one is what is looked for."""
        if len(tokens) < len(self._earlier) and len(self._earlier) > self._min_n:
            raise ValueError(f"{len(tokens)} tokens after {len(self._earlier)}: sequences only grow")
        for place in range(len(self._earlier), len(tokens)):
            key = tuple(tokens[place - self._min_n : place])
            self._earlier.append(self._latest.get(key, -1))
            self._latest[key] = place

    def _best_place(self, tokens: Sequence[int]) -> int:
        """Where the best earlier occurrence of the sequence's end goes on; -1 when there is none."""
        if len(tokens) < self._min_n:
            return -1
        place = self._latest.get(tuple(tokens[len(tokens) - self._min_n :]), -1)
        best, best_length = -1, 0
        for _ in range(self.MAX_CANDIDATES):
            if place < 0 or best_length == self._max_n:
                break
            length = self._agreement(tokens, place)
            if length > best_length:
                best, best_length = place, length
            place = self._earlier[place]
        return best

    def _agreement(self, tokens: Sequence[int], place: int) -> int:
        """Over how many tokens the one before `place` and the sequence's end agree, at most `max_n`."""
        stop = min(self._max_n, place)
        length = self._min_n
        while length < stop and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        return length

    def __repr__(self) -> str:
        return f"PromptLookup({self._min_n}..{self._max_n}, {len(self._latest)} n-grams)"
