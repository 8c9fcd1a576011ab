"""Replace a model in the simulator: compute the duration of a step from its contents, and sampled tokens from
hashes."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
"""Pages of output tokens that are cached, about 400 bytes each. The output of a request spans two or three pages."""

StepTime = Callable[[StepFeatures], float]
"""Function from the features of a step to its seconds, such as `StepCost.predict` or a `Roofline.timer`.

It must depend on its argument alone, because workers look ahead over several steps. It may keep state where a worker
plans every step by itself (`WorkerSpec.max_run` is 1)."""


@dataclass(eq=False, slots=True)
class SimExecutor:
    """Executor without a model, for the simulator; implements `engine.ports.Executor`.

    A sampled token depends on the request's seed, the choice and the token's index alone, so every worker samples the
    same tokens. Requests end by length unless a sampled token is one of their stop tokens.

    `residuals`: factors on the time of a step; `seed`, `worker` and the number of the step pick one of the factors for
    the step's kind. `host_copy_s`: seconds to copy one block to or from host memory, which are added to that time,
    because a worker computes nothing meanwhile.
    """

    layout: KVLayout
    num_blocks: int
    step_time: StepTime
    seed: int = 0
    worker: str = ""
    residuals: Residuals = NONE
    num_host_slots: int = 0
    host_copy_s: float = 0.0
    vocab_size: int = field(default=seeded_random.HIGHEST_TOKEN, init=False)

    def seconds(self, plan: StepPlan) -> float:
        """Return the seconds of virtual time that `execute` of this plan takes, copies between the pool and host memory
        included."""
        seconds = self.step_seconds(plan.number, features(plan.slices)) if plan.slices else 0.0
        return seconds + plan.num_host_copies * self.host_copy_s

    def step_seconds(self, number: int, step: StepFeatures) -> float:
        """Return the seconds that the step with this number and these features takes, without copies between the pool
        and host memory."""
        factors = self.residuals.of(step)
        if len(factors) == 1:
            return self.step_time(step) * factors[0]
        index = seeded_random.integer(0, len(factors) - 1, self.seed, "step", self.worker, number)
        return self.step_time(step) * factors[index]

    def execute(self, plan: StepPlan) -> StepResult:
        digests = tuple(BlockDigest(block, ()) for block, _ in plan.digests)
        return StepResult(plan.number, tuple(_result(piece) for piece in plan.slices), digests)

    def sample_run(self, run: DecodeRun, num_steps: int) -> list[array[int]]:
        """Return the tokens that the first `num_steps` decode steps of `run` sample: one array for each sequence, with
        one token of each step."""
        return [_stream(sampling, num_steps) for sampling in run.samplings]


def _result(piece: ScheduledSlice) -> SliceResult:
    """Return the result of one slice. Blocks have no bytes here, so digests cover none; there are no logits, so every
    scored token has log probability 0."""
    digests = tuple(BlockDigest(block, ()) for block in piece.digest_blocks)
    scores = tuple(SampledToken(token, 0.0) for token in piece.scored)
    return SliceResult(piece.seq, _sampled(piece), digests, scores=scores)


def _sampled(piece: ScheduledSlice) -> tuple[SampledToken, ...]:
    """Return one sampled token for each choice, and one more for each accepted draft token."""
    if piece.sampling is None:
        return ()
    if piece.sampling.num_choices > 1:
        return tuple(
            token for sampling in piece.sampling.per_choice() for token in _sampled(replace(piece, sampling=sampling))
        )
    params, guesses = piece.sampling.params, piece.tokens[piece.num_certain :]
    out: list[SampledToken] = []
    for guess in (*guesses, None):
        token = token_at(params.seed, piece.sampling.choice, piece.sampling.index + len(out))
        while piece.sampling.index + len(out) < params.min_tokens and token in params.stop_token_ids:
            token += 1
        out.append(SampledToken(token))
        if token != guess:
            break
    return tuple(out)


def token_at(seed: int, choice: int, index: int) -> int:
    """Return the token that every worker samples for this seed, choice and index."""
    page, offset = divmod(index, PAGE_TOKENS)
    return _page(seed, choice, page)[offset]


def _stream(sampling: Sampling, count: int) -> array[int]:
    """Return the next `count` sampled tokens of a choice, beginning at the index of `sampling`."""
    out: array[int] = array("H")
    page, offset = divmod(sampling.index, PAGE_TOKENS)
    while len(out) < count:
        out += _page(sampling.params.seed, sampling.choice, page)[offset : offset + count - len(out)]
        page, offset = page + 1, 0
    return out


@lru_cache(maxsize=NUM_PAGES)
def _page(seed: int, choice: int, page: int) -> array[int]:
    return array("H", seeded_random.tokens(PAGE_TOKENS, seed, "output", choice, page))
