"""Replay the step times of one real run, to separate errors of the simulator from errors of a fitted step cost."""

from __future__ import annotations

from tandem.core.step_cost import StepCost, StepFeatures
from tandem.engine.step_log import StepLog

REACH = 48
"""How many recorded steps before and after the expected one are searched for a match."""


class Replay:
    """Give each simulated step the time of a recorded step of one real run.

    A recorded step matches when it has as many prompt tokens and decodes. Of the matches, the one is used that has the
    nearest number of prefill pairs, and of several such the one nearest to the expected position; each recorded step is
    used once. Without a match (a request met another step than in the real run) the step takes the time that `cost`
    predicts, times the ratio of measured to predicted time of the expected step.
    """

    def __init__(self, log: StepLog, cost: StepCost) -> None:
        self._steps = [step.record for step in log.steps if not step.record.has_failed]
        self._cost = cost
        self._next = 0
        self._is_used = [False] * len(self._steps)
        self.num_matched = 0
        self.num_unmatched = 0

    def seconds(self, step: StepFeatures) -> float:
        """Return the seconds of the next step of the run; must be called in the order of the steps."""
        found = self._nearest(step)
        if found is not None:
            self.num_matched += 1
            self._is_used[found] = True
            self._next = found + 1
            return self._steps[found].measured_s
        self.num_unmatched += 1
        expected = self._steps[min(self._next, len(self._steps) - 1)]
        return self._cost.predict(step) * expected.measured_s / self._cost.predict(expected.features)

    def _nearest(self, step: StepFeatures) -> int | None:
        low, high = max(0, self._next - REACH), min(len(self._steps), self._next + REACH)
        matches = [i for i in range(low, high) if not self._is_used[i] and _are_alike(self._steps[i].features, step)]
        return min(matches, key=lambda i: (self._pairs_off(i, step), abs(i - self._next)), default=None)

    def _pairs_off(self, i: int, step: StepFeatures) -> int:
        return abs(self._steps[i].features.num_prefill_pairs - step.num_prefill_pairs)


def _are_alike(a: StepFeatures, b: StepFeatures) -> bool:
    return (a.num_prefill_tokens, a.num_decode_seqs) == (b.num_prefill_tokens, b.num_decode_seqs)
