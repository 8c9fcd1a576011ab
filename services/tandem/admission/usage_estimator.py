"""What a request will use of a quota, before and after; never takes it."""

from __future__ import annotations

from typing import NamedTuple

FIRST_GUESS = 256
"""Output tokens of a tenant of whom nothing is known."""
_HISTORY = 8
"""Requests, about, whose outputs make the guess."""


class TokenUsage(NamedTuple):
    """Tokens that count: of the prompt those that no prefix cache had, and all output."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


class OutputLengthEstimator:
    """A moving mean of the outputs of one tenant: most clients leave `max_tokens` far above what they get, and a
    reservation of all of it would keep others of the same tenant out."""

    __slots__ = ("_mean",)

    def __init__(self) -> None:
        self._mean = FIRST_GUESS * _HISTORY

    def estimate(self, num_prompt_tokens: int, max_output_tokens: int, tokens_per_minute: int) -> int:
        """Tokens to reserve, never more than a whole bucket."""
        tokens = num_prompt_tokens + min(max_output_tokens, self._mean // _HISTORY)
        return min(tokens, tokens_per_minute) if tokens_per_minute else tokens

    def learn(self, num_output_tokens: int) -> None:
        self._mean += num_output_tokens - self._mean // _HISTORY
