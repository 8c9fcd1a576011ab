"""Runs a step in name only: how long it takes is a function of what it computes, its tokens are hashes; never touches
a model or waits."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from tandem.core.events import SampledToken
from tandem.core.step_cost import StepFeatures
from tandem.kv.handoff import BlockDigest
from tandem.kv.layout import KVLayout
from tandem.sched.budget.step_time_model import features
from tandem.sched.phases.decode_run import DecodeRun
from tandem.sched.state.step_plan import Sampling, ScheduledSlice, SliceResult, StepPlan, StepResult
from tandem.sim.cost.residuals import NONE, Residuals
from tandem.workload import seeded_random

PAGE_TOKENS = 128
NUM_PAGES = 1 << 15
"""Pages of answers that are kept, some 400 bytes each: a request is drawn in two or three of them."""

StepTime = Callable[[StepFeatures], float]
"""Seconds of a step; `StepCost.predict` and `Roofline.seconds` are such. A function of what it is given, as steps may
be looked at ahead, unless the worker takes every step by itself (`WorkerSpec.max_run` is 1)."""


@dataclass(frozen=True, slots=True)
class SimHostMemory:
    """Room for `num_slots` blocks beside the pool. A copy of one, either way, takes `copy_s` seconds, in which nothing
    is computed."""

    num_slots: int = 0
    copy_s: float = 0.0


class SimExecutor:
    """An `engine.ports.Executor`. A token depends on the request's seed, the choice and its index alone, so that every
    worker draws the same; requests end by length unless they name a stop token that comes up.

    `residuals` are factors on the step's time; each step draws one of its kind's by `seed`, `worker` and its number.
    Copies to host memory and back come on top.
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
        host: SimHostMemory = SimHostMemory(),
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.vocab_size = seeded_random.HIGHEST_TOKEN
        self.num_host_slots = host.num_slots
        self._host_copy_s = host.copy_s
        self._step_time = step_time
        self._seed = seed
        self._worker = worker
        self._residuals = residuals

    def seconds(self, plan: StepPlan) -> float:
        """How long `execute` would take."""
        seconds = self.step_seconds(plan.number, features(plan.slices)) if plan.slices else 0.0
        return seconds + plan.num_host_copies * self._host_copy_s

    def step_seconds(self, number: int, step: StepFeatures) -> float:
        """How long the plan of this number computes."""
        factors = self._residuals.of(step)
        if len(factors) == 1:
            return self._step_time(step) * factors[0]
        index = seeded_random.integer(0, len(factors) - 1, self._seed, "step", self._worker, number)
        return self._step_time(step) * factors[index]

    def execute(self, plan: StepPlan) -> StepResult:
        digests = tuple(BlockDigest(block, ()) for block, _ in plan.digests)
        return StepResult(plan.number, tuple(_result(piece) for piece in plan.slices), digests)

    def draw(self, run: DecodeRun, num_steps: int) -> list[array[int]]:
        """The tokens of a run's first steps, for each of its sequences."""
        return [_stream(draw, num_steps) for draw in run.samplings]


def _result(piece: ScheduledSlice) -> SliceResult:
    """Nothing has bytes here, so digests cover none; and nothing has logits, so what came was certain to."""
    digests = tuple(BlockDigest(block, ()) for block in piece.digest_blocks)
    scores = tuple(SampledToken(token, 0.0) for token in piece.scored)
    return SliceResult(piece.seq, _drawn(piece), digests, scores=scores)


def _drawn(piece: ScheduledSlice) -> tuple[SampledToken, ...]:
    """One token of each choice, and one more for each guess that was right."""
    if piece.sampling is None:
        return ()
    if piece.sampling.num_choices > 1:
        return tuple(token for draw in piece.sampling.per_choice() for token in _drawn(replace(piece, sampling=draw)))
    params, guesses = piece.sampling.params, piece.tokens[piece.num_certain :]
    out: list[SampledToken] = []
    for guess in (*guesses, None):
        page, place = divmod(piece.sampling.index + len(out), PAGE_TOKENS)
        token = _page(params.seed, piece.sampling.choice, page)[place]
        while piece.sampling.index + len(out) < params.min_tokens and token in params.stop_token_ids:
            token += 1
        out.append(SampledToken(token))
        if token != guess:
            break
    return tuple(out)


def token_at(seed: int, choice: int, index: int) -> int:
    """What every worker draws there."""
    page, place = divmod(index, PAGE_TOKENS)
    return _page(seed, choice, page)[place]


def _stream(draw: Sampling, count: int) -> array[int]:
    """The tokens of `count` draws, of which this is the first."""
    out: array[int] = array("H")
    page, place = divmod(draw.index, PAGE_TOKENS)
    while len(out) < count:
        out += _page(draw.params.seed, draw.choice, page)[place : place + count - len(out)]
        page, place = page + 1, 0
    return out


@lru_cache(maxsize=NUM_PAGES)
def _page(seed: int, choice: int, page: int) -> array[int]:
    return array("H", seeded_random.tokens(PAGE_TOKENS, seed, "output", choice, page))
