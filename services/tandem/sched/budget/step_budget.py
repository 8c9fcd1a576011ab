"""Limit how many prefill tokens one step may compute beside its decodes.

With a latency target the budget is the time that decodes leave, converted to tokens at the start of a prompt and
rounded down to a rung of a ladder of sizes. The budget falls at once, because a step over its target is noticed, and
rises only after a higher rung has fitted with a margin for `PATIENCE` steps, so that noise lowers the budget at most
once and does not make it oscillate.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

from tandem.core.step_cost import StepCost

LEAST_TOKENS = 8
"""Lowest rung, in tokens. A latency target that leaves time for fewer prefill tokens is exceeded instead."""
FLOOR_TOKENS = 32
"""Prefill tokens of a step that exceeds its target in any case. With both constants, a prompt of n tokens that is alone
takes at most n / 8 steps within the target, and n / 32 steps beyond."""
PATIENCE = 8
"""Consecutive steps in which a higher rung must fit before the budget rises."""
MARGIN = 1.1
"""Factor by which the affordable tokens must exceed a rung before the budget rises to that rung."""


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """Remaining prefill budget of one step: `num_tokens`, and under a latency target also `seconds`, priced by `cost`.

    Under a target time is the limit, so a chunk gets shorter the further into its prompt it begins.
    """

    num_tokens: int
    seconds: float = math.inf
    cost: StepCost | None = None

    def fit(self, start: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens from position `start` on the budget pays for."""
        num_tokens = min(num_tokens, self.num_tokens)
        if self.cost is None or num_tokens <= 0:
            return max(0, num_tokens)
        return int(min(num_tokens, self.cost.chunk_tokens(start, self.seconds) + 1e-6))

    def less(self, start: int, num_tokens: int) -> PrefillBudget:
        """Return the budget that remains after a chunk; `seconds` may become negative."""
        spent = 0.0 if self.cost is None else self.cost.chunk_s(start, num_tokens)
        return replace(self, num_tokens=max(0, self.num_tokens - num_tokens), seconds=self.seconds - spent)

    def part(self, number: int) -> PrefillBudget:
        """Return one of `number` equal parts, tokens rounded up."""
        return replace(self, num_tokens=-(-self.num_tokens // number), seconds=self.seconds / number)

    def floor(self) -> PrefillBudget:
        """Return the tokens, without a time limit, of a step that cannot compute `LEAST_TOKENS` within its target."""
        return PrefillBudget(min(self.num_tokens, FLOOR_TOKENS))


class StepBudget:
    """Own the current prefill budget of a worker, as a rung of a ladder of sizes.

    Rungs are `LEAST_TOKENS` times 1, 1.5, 2, 3, 4, 6, 8, ..., and `max_tokens`. `num_moves` counts changes of the rung.
    """

    def __init__(self, max_tokens: int) -> None:
        self.rungs = ladder(max_tokens)
        self.num_moves = 0
        self._rung = 0
        self._num_higher = 0
        self._lowest = math.inf

    @property
    def num_tokens(self) -> int:
        return self.rungs[self._rung]

    def choose(self, num_affordable: float) -> int:
        """Return the budget, in tokens, of a step that can afford `num_affordable` tokens within its target.

        The module docstring describes when the budget falls and rises.
        """
        fits = self._highest(num_affordable)
        if fits < self._rung:
            self._move(fits)
        elif self._highest(num_affordable / MARGIN) <= self._rung:
            self._num_higher = 0
            self._lowest = math.inf
        else:
            self._num_higher += 1
            self._lowest = min(self._lowest, num_affordable)
            if self._num_higher >= PATIENCE:
                self._move(self._highest(self._lowest / MARGIN))
        return self.num_tokens

    def _highest(self, num_tokens: float) -> int:
        return max(0, bisect_right(self.rungs, num_tokens) - 1)

    def _move(self, rung: int) -> None:
        self._rung = rung
        self._num_higher = 0
        self._lowest = math.inf
        self.num_moves += 1


def ladder(max_tokens: int) -> tuple[int, ...]:
    """Return the rungs up to and including `max_tokens`, which may be less than `LEAST_TOKENS`."""
    powers = (LEAST_TOKENS << shift for shift in range((max_tokens // LEAST_TOKENS).bit_length()))
    steps = [rung for power in powers for rung in (power, power * 3 // 2) if rung < max_tokens]
    return (*steps, max_tokens)
