"""Estimate the tokens that a request will use of a quota."""

from __future__ import annotations

from typing import NamedTuple

FIRST_GUESS = 256
"""Estimated output tokens for a tenant without history."""
_HISTORY = 8
"""Approximate number of requests in the moving average."""


class TokenUsage(NamedTuple):
    """Tokens that count against a quota: prompt tokens not found in a prefix cache, and all output."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


class OutputLengthEstimator:
    """Moving average of one tenant's output lengths: most clients set `max_tokens` far above what they receive, and
    reserving all of it would block other requests of the same tenant."""

    __slots__ = ("_mean",)

    def __init__(self) -> None:
        self._mean = FIRST_GUESS * _HISTORY

    def estimate(self, num_prompt_tokens: int, max_output_tokens: int, tokens_per_minute: int) -> int:
        """Return the tokens to reserve, at most a full bucket."""
        tokens = num_prompt_tokens + min(max_output_tokens, self._mean // _HISTORY)
        return min(tokens, tokens_per_minute) if tokens_per_minute else tokens

    def learn(self, num_output_tokens: int) -> None:
        self._mean += num_output_tokens - self._mean // _HISTORY
