"""How much of prompts one step may compute beside its decodes; never looks at a sequence.

With a latency target the budget is the time that decodes leave, in tokens of a prompt's beginning, rounded down to a
rung of a ladder. It falls at once, because a step over its target is felt, and rises only when a higher rung has
fitted, with room to spare, for `PATIENCE` steps: so noise moves it down at most once, and never up and down again.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

from tandem.core.step_cost import StepCost

LEAST_TOKENS = 8
"""The lowest rung. A target that leaves time for fewer tokens of prompts is not worth keeping."""
FLOOR_TOKENS = 32
"""Then a step computes so many: it is late in any case, so at least it shall be worth it. With the two, a prompt of n
tokens that is alone takes at most n / 8 steps within its target, and n / 32 beyond it."""
PATIENCE = 8
MARGIN = 1.1
"""How much more than a rung must fit before the budget rises to it."""


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """What is left for prompts in one step: `num_tokens`, and with a target also `seconds` by `cost`.

    Time is what counts under a target, so a chunk is the shorter the further into its prompt it begins.
    """

    num_tokens: int
    seconds: float = math.inf
    cost: StepCost | None = None

    def fit(self, start: int, num_tokens: int) -> int:
        """How many of `num_tokens` from position `start` on it pays for."""
        num_tokens = min(num_tokens, self.num_tokens)
        if self.cost is None or num_tokens <= 0:
            return max(0, num_tokens)
        return int(min(num_tokens, self.cost.chunk_tokens(start, self.seconds) + 1e-6))

    def less(self, start: int, num_tokens: int) -> PrefillBudget:
        """What is left after a chunk; of time it may be less than nothing."""
        spent = 0.0 if self.cost is None else self.cost.chunk_s(start, num_tokens)
        return replace(self, num_tokens=max(0, self.num_tokens - num_tokens), seconds=self.seconds - spent)

    def part(self, number: int) -> PrefillBudget:
        """One of so many equal parts, rounded up."""
        return replace(self, num_tokens=-(-self.num_tokens // number), seconds=self.seconds / number)

    def floor(self) -> PrefillBudget:
        """What a step may do whatever it costs, when it cannot do `LEAST_TOKENS` in time."""
        return PrefillBudget(min(self.num_tokens, FLOOR_TOKENS))


class StepBudget:
    """The rung of the ladder that the worker is on. Rungs are `LEAST_TOKENS` times 1, 1.5, 2, 3, 4, 6, 8, ..., and
    `max_tokens`. `num_moves` counts changes."""

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
        """The budget of a step that could afford so many tokens within its target; see the module's first lines."""
        fits = self._highest(num_affordable)
        if fits < self._rung:
            self._move(fits)
        elif self._highest(num_affordable / MARGIN) <= self._rung:
            self._num_higher, self._lowest = 0, math.inf
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
        self._num_higher, self._lowest = 0, math.inf
        self.num_moves += 1


def ladder(max_tokens: int) -> tuple[int, ...]:
    """Rungs up to and including `max_tokens`, which may be less than `LEAST_TOKENS`."""
    powers = (LEAST_TOKENS << shift for shift in range((max_tokens // LEAST_TOKENS).bit_length()))
    steps = [rung for power in powers for rung in (power, power * 3 // 2) if rung < max_tokens]
    return (*steps, max_tokens)
