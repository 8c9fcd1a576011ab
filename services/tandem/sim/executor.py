"""Runs a step in name only: how long it takes is a function of what it computes, its tokens are hashes; never touches
a model or waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.core.events import SampledToken
from tandem.core.step_cost import StepFeatures
from tandem.kv.handoff import BlockDigest
from tandem.kv.layout import KVLayout
from tandem.sched.plan import Slice, SliceResult, StepPlan, StepResult
from tandem.sched.step_cost import features
from tandem.workload import chance

StepTime = Callable[[StepFeatures], float]
"""Seconds of a step; `StepCost.predict` and `Roofline.seconds` are such."""


class SimExecutor:
    """An `engine.ports.Executor`. A token depends on the request's seed, the choice and its index alone, so that every
    worker draws the same; requests end by length unless they name a stop token that comes up.

    `residuals` are factors on the step's time, such as a fit's quantiles; each step draws one by `seed`, `worker` and
    its number.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        step_time: StepTime,
        *,
        seed: int = 0,
        worker: str = "",
        residuals: Sequence[float] = (1.0,),
    ) -> None:
        if not residuals or min(residuals) <= 0:
            raise ValueError(f"residuals are factors above 0, got {residuals}")
        self.layout = layout
        self.num_blocks = num_blocks
        self._step_time = step_time
        self._seed = seed
        self._worker = worker
        self._residuals = tuple(residuals)

    def seconds(self, plan: StepPlan) -> float:
        """How long `execute` would take."""
        index = chance.integer(0, len(self._residuals) - 1, self._seed, "step", self._worker, plan.number)
        return self._step_time(features(plan.slices)) * self._residuals[index]

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
