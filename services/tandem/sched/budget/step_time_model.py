"""Fit the step-time model `t = a + b*prefill_tokens + c*decode_seqs + d*decode_context + e*pairs` online.

Weighted least squares with exponential forgetting (`MEMORY`), non-negative coefficients, and a weak preference for the
coefficients measured at start-up. Residuals are relative, because the noise of a shared machine is multiplicative. A
change that slows the whole machine, such as another process that takes half of it, is followed within about ten steps
by one factor on all coefficients (`level` in `observe`), and later by the coefficients themselves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from tandem.core.step_cost import StepCost, StepFeatures
from tandem.sched.budget.nnls import NormalEquations, solve_non_negative
from tandem.sched.state.step_plan import ScheduledSlice

GENERIC = StepCost(5e-3, 2e-4, 2e-4, 1e-7, 1e-8)
"""Prior without a calibration. It may be wrong by any factor, but the first measured steps outweigh it."""
MEMORY = 128.0
"""Number of steps of the same kind after which a step's weight has fallen to 1/e. Steps with and without prefill are
kept apart, so that hours of decoding do not erase what a prompt costs."""
RIDGE = 1.0
"""Weight of the calibration, per coefficient, in steps that this coefficient explains alone."""
REFIT_STEPS = 8
"""Steps between two fits; solving takes ten times as long as recording a step."""
NUM_UNCLIPPED = 24
"""Steps at the start whose residuals are not clipped, because there is no scale yet to recognise an outlier."""
CLIP = 4.0
"""Residuals are clipped to this many running scales."""
SCALE_RATE = 0.1
"""Weight of the newest measurement in the running scale of the residuals."""
MIN_SCALE, FIRST_SCALE, MAX_SCALE = 0.02, 0.25, 1.0
"""Bounds and start value of that running scale (relative residual)."""
MIN_RATIO = 0.05
"""Smallest ratio of measured to predicted time that a clipped step may have."""
LEAST_UNIT = 0.1
"""Smallest scale of a coefficient, as a fraction of the value that would explain all steps alone."""
NUM_RECENT = 16
"""Steps over which the level and the scale are computed."""
MIN_S = 1e-7
"""Lower bound of every prediction, in seconds, so that relative residuals stay finite."""
PUBLISH_CHANGE = 0.04
"""Relative change of a typical prediction from which the new cost is published to the gateways."""
_TYPICAL = (
    StepFeatures(num_decode_seqs=1, decode_context=256),
    StepFeatures(num_decode_seqs=32, decode_context=32 * 1024),
    StepFeatures(num_prefill_tokens=256, num_prefill_pairs=256 * 128),
    StepFeatures(num_prefill_tokens=256, num_prefill_pairs=256 * 4096),
)


def features(slices: Iterable[ScheduledSlice]) -> StepFeatures:
    """Count the work of a plan with these slices, and return it as the `StepFeatures` from which step times are
    predicted."""
    num_tokens = num_seqs = context = pairs = 0
    for piece in slices:
        start, length = piece.start, piece.num_tokens
        if piece.num_certain == 1:
            num_seqs += 1
            context += start + 1
            start, length = start + 1, piece.num_drafted
        num_tokens += length
        pairs += length * (start + piece.stop + 1) // 2
    return StepFeatures(num_tokens, num_seqs, context, pairs)


class StepCostModel:
    """Predict step times, and improve the prediction with each measured step.

    - `cost`: the current fit.
    - `published`: the fit that gateways receive. It is replaced by `cost` only when predictions have changed by the
      fraction PUBLISH_CHANGE. None until steps or a calibration were measured.
    - `noise`: standard deviation of the last steps' relative errors (measured / predicted - 1), estimated from their
      median distance so that outliers count little.
    """

    published: StepCost | None

    def __init__(self) -> None:
        self.restart(GENERIC)
        self.published = None

    def restart(self, prior: StepCost) -> None:
        """Forget all measured steps and begin again with the coefficients `prior`, such as those measured at start-up.
        They become `cost` and `published`."""
        self.cost = prior
        self.published = prior
        self._prior = prior
        self._fit = prior
        size = len(prior.vector)
        self._mixed = NormalEquations(size, MEMORY)
        self._decodes = NormalEquations(size, MEMORY)
        self._recent: deque[tuple[StepFeatures, float]] = deque(maxlen=NUM_RECENT)
        self._ratios: deque[float] = deque(maxlen=NUM_RECENT)
        self.noise = FIRST_SCALE
        self._num_steps = 0

    def predict(self, step: StepFeatures) -> float:
        """Return the predicted duration of a step, in seconds."""
        return max(MIN_S, self.cost.predict(step))

    def observe(self, step: StepFeatures, seconds: float) -> None:
        """Learn that a step with the work `step` took `seconds`. Raises ValueError unless `seconds` is positive and
        finite."""
        if not 0 < seconds < math.inf:
            raise ValueError(f"a step took {seconds} s")
        self._num_steps += 1
        self._recent.append((step, seconds))
        self._ratios.append(seconds / max(MIN_S, self._fit.predict(step)))
        predicted = self.predict(step)
        if self._num_steps > NUM_UNCLIPPED:
            limit = CLIP * self.noise
            seconds = predicted * max(1 - limit, MIN_RATIO, min(1 + limit, seconds / predicted))
        weight = 1 / max(predicted, seconds)
        kind = self._mixed if step.num_prefill_tokens else self._decodes
        kind.add([weight * x for x in step.vector], weight * seconds)
        if self._num_steps % REFIT_STEPS == 0:
            self._refit()
        level = median(self._ratios)
        # 1.48 times the median distance is the deviation where residuals are normal.
        distance = median([abs(ratio / level - 1) for ratio in self._ratios])
        self.noise += SCALE_RATE * (max(MIN_SCALE, min(MAX_SCALE, 1.48 * distance)) - self.noise)
        self.cost = self._fit.scaled(level)
        if self._num_steps % REFIT_STEPS == 0 and self._has_moved():
            self.published = self.cost

    def _refit(self) -> None:
        self._fit = _solve(self._prior, RIDGE, self._mixed, self._decodes)
        for i, (step, seconds) in enumerate(self._recent):
            self._ratios[i] = seconds / max(MIN_S, self._fit.predict(step))

    def _has_moved(self) -> bool:
        if self.published is None:
            return True
        for step in _TYPICAL:
            published_s = self.published.predict(step)
            if abs(self.cost.predict(step) - published_s) > PUBLISH_CHANGE * published_s:
                return True
        return False


def fit(samples: Sequence[tuple[StepFeatures, float]], shape: StepCost, ridge: float) -> StepCost:
    """Return the coefficients with the least relative error over measured steps, given as pairs (step, seconds).

    `shape`: coefficients of which only the proportions matter. A coefficient that the samples do not determine keeps
    its proportion to the others. `ridge`: weight of `shape` in the fit, as a number of steps. Raises ZeroDivisionError
    without samples.
    """
    ratios = [shape.predict(step) / seconds for step, seconds in samples]
    speed = sum(ratios) / sum(ratio * ratio for ratio in ratios)
    rows = NormalEquations(len(shape.vector), math.inf)
    for step, seconds in samples:
        rows.add([x / seconds for x in step.vector], 1.0)
    return _solve(shape.scaled(speed), ridge, rows)


def _solve(prior: StepCost, ridge: float, *rows: NormalEquations) -> StepCost:
    """Solve the summed normal equations with a ridge of weight `ridge` towards `prior`.

    Coefficients are scaled by the prior, so that steps which cannot separate two coefficients change both in
    proportion. The scale has a lower bound (`LEAST_UNIT`), so that a prior that is far too small does not bind.
    """
    grams, moments = zip(*(part.read() for part in rows), strict=True)
    gram = [[sum(cells) for cells in zip(*lines, strict=True)] for lines in zip(*grams, strict=True)]
    moment = [sum(cells) for cells in zip(*moments, strict=True)]
    size = len(moment)
    alone = [moment[i] / gram[i][i] if gram[i][i] > 0 else 0.0 for i in range(size)]
    unit = [max(value, LEAST_UNIT * alone[i]) or 1.0 for i, value in enumerate(prior.vector)]
    scaled = [[unit[i] * gram[i][j] * unit[j] for j in range(size)] for i in range(size)]
    pull = [unit[i] * moment[i] for i in range(size)]
    for i, value in enumerate(prior.vector):
        scaled[i][i] += ridge
        pull[i] += ridge * value / unit[i]
    return StepCost(*(u * x for u, x in zip(unit, solve_non_negative(scaled, pull), strict=True)))
