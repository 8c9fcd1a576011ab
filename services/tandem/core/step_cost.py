"""Predict the time of a step from what it computes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """Count what a step computes, as the input from which its time is predicted.

    A slice (the tokens of one sequence in the step) of one token is a decode, a longer one is a prefill chunk. Draft
    tokens of a decode count as a chunk, because they are computed as one.

    - `num_prefill_tokens`: tokens of all chunks. `num_decode_seqs`: number of decodes.
    - `decode_context`: tokens that the decodes attend to, added up over all decodes. Each token attends to itself too.
    - `num_prefill_pairs`: pairs (token, token it attends to) of all chunks. A chunk of n tokens from position s on has
      `n * s + n * (n + 1) / 2`.
    """

    num_prefill_tokens: int = 0
    num_decode_seqs: int = 0
    decode_context: int = 0
    num_prefill_pairs: int = 0

    @property
    def vector(self) -> tuple[float, ...]:
        """Return 1 and the four counts, in the order of the coefficients that `StepCost.vector` returns."""
        return (1.0, self.num_prefill_tokens, self.num_decode_seqs, self.decode_context, self.num_prefill_pairs)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Linear model of a step's time. Each coefficient is in seconds; ValueError is raised for one that is negative or
    not finite.

    `base_s` counts once per step, `prefill_token_s` per prompt token, `decode_seq_s` per decoding sequence,
    `decode_context_s` per token that a decode attends to, and `prefill_pair_s` per (token, token it attends to) pair of
    a prompt.
    """

    base_s: float
    prefill_token_s: float
    decode_seq_s: float
    decode_context_s: float
    prefill_pair_s: float

    def __post_init__(self) -> None:
        if not all([0 <= value < math.inf for value in self.vector]):  # noqa: C419 - faster, at every step
            raise ValueError(f"coefficients must be finite and not negative, got {self}")

    @property
    def vector(self) -> tuple[float, ...]:
        """Return the coefficients in the order of `StepFeatures.vector`."""
        return (self.base_s, self.prefill_token_s, self.decode_seq_s, self.decode_context_s, self.prefill_pair_s)

    def predict(self, features: StepFeatures) -> float:
        """Return the predicted seconds of a step."""
        return (
            self.base_s
            + self.prefill_token_s * features.num_prefill_tokens
            + self.decode_seq_s * features.num_decode_seqs
            + self.decode_context_s * features.decode_context
            + self.prefill_pair_s * features.num_prefill_pairs
        )

    def chunk_s(self, start: int, num_tokens: int) -> float:
        """Return the seconds that a prefill chunk of `num_tokens` tokens from position `start` on adds to a step."""
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) / 2
        return self.prefill_token_s * num_tokens + self.prefill_pair_s * pairs

    def chunk_tokens(self, start: int, seconds: float) -> float:
        """Return how many prompt tokens from position `start` on add `seconds` seconds to a step. The number is not
        rounded, and is infinity where tokens cost nothing."""
        if seconds <= 0:
            return 0.0
        half = self.prefill_pair_s / 2
        slope = self.prefill_token_s + self.prefill_pair_s * (start + 0.5)
        # The root of half * n^2 + slope * n = seconds, written so that neither a small `half` nor a large one cancels.
        divisor = slope + math.sqrt(slope * slope + 4 * half * seconds)
        return 2 * seconds / divisor if divisor > 0 else math.inf

    def scaled(self, factor: float) -> StepCost:
        """Return a copy with all coefficients multiplied by `factor`."""
        return StepCost(*[factor * value for value in self.vector])
