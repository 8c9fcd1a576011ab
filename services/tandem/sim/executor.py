"""Runs a step in name only: how long it takes is a function of what it computes, its tokens are hashes; never touches
a model or waits."""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.events import SampledToken
from tandem.core.step_cost import StepFeatures
from tandem.kv.handoff import BlockDigest
from tandem.kv.layout import KVLayout
from tandem.sched.plan import Slice, SliceResult, StepPlan, StepResult
from tandem.sched.step_cost import features
from tandem.sim.residuals import NONE, Residuals
from tandem.workload import chance

StepTime = Callable[[StepFeatures], float]
"""Seconds of a step; `StepCost.predict` and `Roofline.seconds` are such."""


class SimExecutor:
    """An `engine.ports.Executor`. A token depends on the request's seed, the choice and its index alone, so that every
    worker draws the same; requests end by length unless they name a stop token that comes up.

    `residuals` are factors on the step's time; each step draws one of its kind's by `seed`, `worker` and its number.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        step_time: StepTime,
        *,
        seed: int = 0,
        worker: str = "",
        residuals: Residuals = NONE,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._step_time = step_time
        self._seed = seed
        self._worker = worker
        self._residuals = residuals

    def seconds(self, plan: StepPlan) -> float:
        """How long `execute` would take."""
        step = features(plan.slices)
        factors = self._residuals.of(step)
        index = chance.integer(0, len(factors) - 1, self._seed, "step", self._worker, plan.number)
        return self._step_time(step) * factors[index]

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.number, tuple(_result(piece) for piece in plan.slices))


def _result(piece: Slice) -> SliceResult:
    """Nothing has bytes here, so digests cover none."""
    digests = tuple(BlockDigest(block, ()) for block in piece.digest_blocks)
    return SliceResult(piece.seq, _drawn(piece), digests)


def _drawn(piece: Slice) -> tuple[SampledToken, ...]:
    """One token, and one more for each guess that was right."""
    if piece.sampling is None:
        return ()
    guesses = piece.tokens[piece.num_certain :]
    out: list[SampledToken] = []
    for guess in (*guesses, None):
        params, choice, index = piece.sampling.params, piece.sampling.choice, piece.sampling.index + len(out)
        (token,) = chance.tokens(1, params.seed, "output", choice, index)
        out.append(SampledToken(token))
        if token != guess:
            break
    return tuple(out)
