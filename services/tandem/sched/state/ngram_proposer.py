"""Propose draft tokens for speculative decoding from a sequence's own tokens, without a model.

A guess makes the step compute one token more and cannot change the output: it counts only if the model samples the same
token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol


class Proposer(Protocol):
    """Interface of a source of guessed (draft) tokens for one sequence; an implementation may keep state between calls.

    Implementations must be cheap, need only tokens, and do no I/O. A draft model does not fit: its guesses come from a
    batched call on the executor's thread and from KV of its own. To support one, a plan would contain the number of
    guesses of each slice (`num_drafted`) without their ids, and the executor would fill in the ids before verification.
    The scheduler's part (how many guesses, which blocks, which are accepted) would stay the same.
    """

    def propose(self, tokens: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Return up to `max_tokens` token ids that may follow `tokens`; empty if there is no guess.

        Later calls pass the same `tokens`, possibly with more tokens appended.
        """
        ...


class NgramProposer:
    """Propose the tokens that followed the most recent matching n-gram in the prompt or the output.

    "Prompt lookup decoding" (A. Saxena, 2023; the `ngram` method of vLLM). Candidates are the `MAX_CANDIDATES` most
    recent earlier positions whose preceding `min_n` tokens equal the last `min_n` of the sequence. The candidate with
    the longest match, counted up to `max_n`, wins; ties go to the most recent. A copy that reaches the end of the
    sequence continues with its own tokens, as in LZ77, so that a loop is continued for as many tokens as requested.

    The index is a hash chain over `min_n`-grams, as in zlib: one entry per distinct n-gram (its last position) and four
    bytes per token (the position before that). Adding a token is O(1); a lookup compares at most MAX_CANDIDATES x max_n
    tokens.
    """

    MAX_CANDIDATES = 32

    def __init__(self, min_n: int, max_n: int) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"n-grams of {min_n} to {max_n} tokens")
        self._min_n = min_n
        self._max_n = max_n
        # A place is the index of the token after an n-gram; `_earlier` links each place to the one before.
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier = array("i", [-1] * min_n)

    def propose(self, tokens: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Implement `Proposer.propose`. Raises ValueError when `tokens` are fewer than in an earlier call."""
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
        """Index the n-grams that are followed by a known token; the last n-gram of the sequence is the search key, not
        an entry."""
        if len(tokens) < len(self._earlier) and len(self._earlier) > self._min_n:
            raise ValueError(f"{len(tokens)} tokens after {len(self._earlier)}: sequences only grow")
        for place in range(len(self._earlier), len(tokens)):
            key = tuple(tokens[place - self._min_n : place])
            self._earlier.append(self._latest.get(key, -1))
            self._latest[key] = place

    def _best_place(self, tokens: Sequence[int]) -> int:
        """Return the position after the best earlier match of the sequence's last tokens; -1 when there is none."""
        if len(tokens) < self._min_n:
            return -1
        place = self._latest.get(tuple(tokens[len(tokens) - self._min_n :]), -1)
        best, best_length = -1, 0
        for _ in range(self.MAX_CANDIDATES):
            if place < 0 or best_length == self._max_n:
                break
            length = self._match_length(tokens, place)
            if length > best_length:
                best, best_length = place, length
            place = self._earlier[place]
        return best

    def _match_length(self, tokens: Sequence[int], place: int) -> int:
        """Count how many tokens before `place` equal the last tokens of the sequence, at most `max_n`."""
        stop = min(self._max_n, place)
        length = self._min_n
        while length < stop and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        return length

    def __repr__(self) -> str:
        return f"NgramProposer({self._min_n}..{self._max_n}, {len(self._latest)} n-grams)"
