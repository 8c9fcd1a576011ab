"""Drive an executor with hand-made plans over several prompts at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.core.ids import BlockId, SeqId
from tandem.core.request import SamplingParams
from tandem.sched.state.step_plan import Sampling, ScheduledSlice, StepPlan

if TYPE_CHECKING:
    from tandem.runtime.model_loader import AnyExecutor


@dataclass(slots=True)
class Run:
    """One prompt on its way; `known` are prompt and output."""

    seq: SeqId
    known: list[int]
    blocks: tuple[BlockId, ...]
    params: SamplingParams
    num_computed: int = 0
    outputs: list[int] = field(default_factory=list)

    def slice(self, budget: int, chained: bool) -> ScheduledSlice:
        """The next step of this prompt: a chunk of at most `budget`, or one decode."""
        count = min(budget, len(self.known) - self.num_computed)
        stop = self.num_computed + count
        sampling = Sampling(self.params, 0, len(self.outputs)) if stop == len(self.known) else None
        is_chained = chained and bool(self.outputs)
        tokens = () if is_chained else tuple(self.known[self.num_computed : stop])
        return ScheduledSlice(self.seq, self.num_computed, count, tokens, self.blocks, sampling, chained=is_chained)


def generate(
    executor: AnyExecutor,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    chunk: int | None = None,
    chained: bool = False,
    stagger: int = 0,
    params: SamplingParams | None = None,
) -> list[list[int]]:
    """Outputs of all prompts, computed in company. `chunk`: tokens of a prompt per step, None for all of it;
    `stagger`: steps between one prompt's start and the next. Blocks are dealt from a shuffled pool."""
    params = params or SamplingParams(max_tokens=max_tokens, temperature=0)
    free = [BlockId(i) for i in range(executor.num_blocks)]
    random.Random(len(prompts) * 1000 + executor.layout.block_size).shuffle(free)
    runs: list[Run] = []
    for i, prompt in enumerate(prompts):
        count = executor.layout.num_blocks_for(len(prompt) + max_tokens)
        blocks, free = tuple(free[:count]), free[count:]
        runs.append(Run(SeqId(i), list(prompt), blocks, params))
    number = 0
    while any(len(run.outputs) < max_tokens for run in runs):
        active = [run for i, run in enumerate(runs) if number >= i * stagger and len(run.outputs) < max_tokens]
        if active:
            _step(executor, active, number, chunk or 10**9, chained)
        number += 1
    return [run.outputs for run in runs]


def _step(executor: AnyExecutor, active: Sequence[Run], number: int, budget: int, chained: bool) -> None:
    slices = tuple(run.slice(budget, chained) for run in active)
    result = executor.execute(StepPlan(number, slices))
    assert result.number == number
    for run, piece, outcome in zip(active, slices, result.slices, strict=True):
        assert outcome.error is None, outcome.error
        assert outcome.seq == run.seq
        run.num_computed = piece.stop
        assert len(outcome.tokens) == (piece.sampling is not None)
        for token in outcome.tokens:
            run.outputs.append(token.id)
            run.known.append(token.id)
