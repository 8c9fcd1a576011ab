"""Fits the step-time model `t = a + b*prefill_tokens + c*decode_seqs + d*decode_context + e*pairs` online; never times
a step itself.

Weighted least squares on what is left of the past (`MEMORY`), coefficients not negative, with a weak pull towards a
start-up calibration. Residuals are relative, because the noise of a shared machine multiplies. What changes all of a
machine at once, such as a neighbour that takes half of it, is followed within some ten steps by one factor on all
coefficients (`_level`), and by the coefficients themselves later.
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
"""For want of a calibration; wrong by any factor, but the first steps count for more than it does."""
MEMORY = 128.0
"""A step counts 1/e after so many of its kind. Steps with prompts and steps without are kept apart: hours of decoding
must not make the model forget what a prompt costs."""
RIDGE = 1.0
"""The calibration counts as much, for each coefficient, as so many steps that it explains alone."""
REFIT_STEPS = 8
"""Solving takes ten times as long as taking a step in."""
NUM_UNCLIPPED = 24
"""The first steps are taken as they are: there is no scale yet by which one could be an outlier."""
CLIP = 4.0
"""A residual beyond this many running scales counts as one of just so many."""
SCALE_RATE = 0.1
MIN_SCALE, FIRST_SCALE, MAX_SCALE = 0.02, 0.25, 1.0
MIN_RATIO = 0.05
LEAST_UNIT = 0.1
NUM_RECENT = 16
MIN_S = 1e-7
"""No step is predicted to take less, in seconds, so that relative residuals stay finite."""
PUBLISH_CHANGE = 0.04
"""Relative change of a typical prediction from which others should hear of it."""
_TYPICAL = (
    StepFeatures(num_decode_seqs=1, decode_context=256),
    StepFeatures(num_decode_seqs=32, decode_context=32 * 1024),
    StepFeatures(num_prefill_tokens=256, num_prefill_pairs=256 * 128),
    StepFeatures(num_prefill_tokens=256, num_prefill_pairs=256 * 4096),
)


def features(slices: Iterable[ScheduledSlice]) -> StepFeatures:
    """What a plan with these slices will cost time for."""
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
    """`cost` is the fit of the moment. `published` follows it only when predictions differ by a few percent; None until
    something was measured."""

    published: StepCost | None

    def __init__(self) -> None:
        self.restart(GENERIC)
        self.published = None

    def restart(self, prior: StepCost) -> None:
        """Forget every step; begin with a calibration."""
        self.cost = prior
        self.published = prior
        self._prior = self._fit = prior
        size = len(prior.vector)
        self._mixed = NormalEquations(size, MEMORY)
        self._decodes = NormalEquations(size, MEMORY)
        self._recent: deque[tuple[StepFeatures, float]] = deque(maxlen=NUM_RECENT)
        self._ratios: deque[float] = deque(maxlen=NUM_RECENT)
        self._scale = FIRST_SCALE
        self._num_steps = 0

    @property
    def noise(self) -> float:
        """Standard deviation of the last steps' relative residuals, as their median distance says: outliers count
        little."""
        return self._scale

    def predict(self, step: StepFeatures) -> float:
        """Seconds."""
        return max(MIN_S, self.cost.predict(step))

    def observe(self, step: StepFeatures, seconds: float) -> None:
        """Take in one measured step. Raises ValueError unless it took time."""
        if not 0 < seconds < math.inf:
            raise ValueError(f"a step took {seconds} s")
        self._num_steps += 1
        self._recent.append((step, seconds))
        self._ratios.append(seconds / max(MIN_S, self._fit.predict(step)))
        predicted = self.predict(step)
        if self._num_steps > NUM_UNCLIPPED:
            limit = CLIP * self._scale
            seconds = predicted * max(1 - limit, MIN_RATIO, min(1 + limit, seconds / predicted))
        weight = 1 / max(predicted, seconds)
        kind = self._mixed if step.num_prefill_tokens else self._decodes
        kind.add([weight * x for x in step.vector], weight * seconds)
        if self._num_steps % REFIT_STEPS == 0:
            self._refit()
        level = median(self._ratios)
        # 1.48 times the median distance is the deviation where residuals are normal.
        distance = median(abs(ratio / level - 1) for ratio in self._ratios)
        self._scale += SCALE_RATE * (max(MIN_SCALE, min(MAX_SCALE, 1.48 * distance)) - self._scale)
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
            told = self.published.predict(step)
            if abs(self.cost.predict(step) - told) > PUBLISH_CHANGE * told:
                return True
        return False


def fit(samples: Sequence[tuple[StepFeatures, float]], shape: StepCost, ridge: float) -> StepCost:
    """The cost that explains measured steps, in seconds, with the least relative error. Where they leave it open, the
    coefficients keep the proportions of `shape`, which counts as much as `ridge` steps."""
    told = [shape.predict(step) / seconds for step, seconds in samples]
    speed = sum(told) / sum(ratio * ratio for ratio in told)
    rows = NormalEquations(len(shape.vector), math.inf)
    for step, seconds in samples:
        rows.add([x / seconds for x in step.vector], 1.0)
    return _solve(shape.scaled(speed), ridge, rows)


def _solve(prior: StepCost, ridge: float, *rows: NormalEquations) -> StepCost:
    """In units of the prior, so that rows that cannot tell two coefficients apart change both in proportion; but of no
    less than a part of what the coefficient would be if it explained everything alone, so that a prior that is far too
    small does not bind."""
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
