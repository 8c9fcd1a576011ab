"""Step times as one real run had them: what separates errors of the simulator from errors of a fit; never fitted."""

from __future__ import annotations

from tandem.core.step_cost import StepCost, StepFeatures
from tandem.engine.step_log import StepLog

REACH = 48
"""How many steps before and after the expected one are looked at."""


class Replay:
    """Gives each step the time of the recorded step like it (as many prompt tokens and decodes) that is nearest to
    where the run should be by now; each recorded step is given once. Where there is none, as when a request met
    another step than in the real run, the step takes what `cost` says times what the expected one took beyond that.
    """

    def __init__(self, log: StepLog, cost: StepCost) -> None:
        self._steps = [step.record for step in log.steps if not step.record.has_failed]
        self._cost = cost
        self._next = 0
        self._is_given = [False] * len(self._steps)
        self.num_like = 0
        self.num_unlike = 0

    def seconds(self, step: StepFeatures) -> float:
        """In the order of the steps."""
        found = self._nearest(step)
        if found is not None:
            self.num_like += 1
            self._is_given[found] = True
            self._next = found + 1
            return self._steps[found].measured_s
        self.num_unlike += 1
        expected = self._steps[min(self._next, len(self._steps) - 1)]
        return self._cost.predict(step) * expected.measured_s / self._cost.predict(expected.features)

    def _nearest(self, step: StepFeatures) -> int | None:
        low, high = max(0, self._next - REACH), min(len(self._steps), self._next + REACH)
        like = [i for i in range(low, high) if not self._is_given[i] and _are_like(self._steps[i].features, step)]
        return min(like, key=lambda i: abs(i - self._next), default=None)


def _are_like(a: StepFeatures, b: StepFeatures) -> bool:
    return (a.num_prefill_tokens, a.num_decode_seqs) == (b.num_prefill_tokens, b.num_decode_seqs)
