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
    """Predict how many output tokens a tenant's requests use, as a moving average.

    Most clients set `max_tokens` far above what they receive, and reserving all of it would block other requests of the
    same tenant.
    """

    __slots__ = ("_mean",)

    def __init__(self) -> None:
        self._mean = FIRST_GUESS * _HISTORY

    def estimate(self, num_prompt_tokens: int, max_output_tokens: int, tokens_per_minute: int) -> int:
        """Return the tokens to reserve for a request: its prompt and its expected output, at most `max_output_tokens`
        of output and `tokens_per_minute` (0: no limit) in total."""
        tokens = num_prompt_tokens + min(max_output_tokens, self._mean // _HISTORY)
        return min(tokens, tokens_per_minute) if tokens_per_minute else tokens

    def learn(self, num_output_tokens: int) -> None:
        """Add the output length of a request that has ended to the average."""
        self._mean += num_output_tokens - self._mean // _HISTORY
