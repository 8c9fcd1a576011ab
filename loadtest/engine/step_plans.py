"""Make step plans by hand, without a scheduler, and measure how long an executor takes for them.

Blocks are in random order, and the KV of contexts that were not computed is random: attention over zeros would be
faster.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from loadtest.engine.step_floor import StepWork, chunk_work, decode_work
from tandem.core.clock import Clock
from tandem.core.ids import BlockId, SeqId
from tandem.core.request import SamplingParams
from tandem.engine.ports import Executor
from tandem.kv.layout import KVLayout
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.models.causal import CausalModel
from tandem.sched.state.step_plan import Sampling, ScheduledSlice, StepPlan, StepResult

_FILLED_AT_ONCE = 1 << 28
_SEED = 11


@runtime_checkable
class Pipelined(Protocol):
    """An executor that accepts the next plan while one runs; results are collected in the order of launching."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...


class ModelExecutor(Executor, Protocol):
    """An executor whose model and KV cache can be accessed."""

    @property
    def cache(self) -> KVCache: ...

    @property
    def model(self) -> CausalModel: ...

    @property
    def max_model_len(self) -> int:
        """Return the longest sequence in tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Decode:
    """Case of decode steps: `batch` sequences sample one token each, greedily.

    In the first step each sequence attends to `context` tokens, itself included.
    """

    batch: int
    context: int

    def __str__(self) -> str:
        return f"decode {self.batch} x {self.context}"

    @property
    def work(self) -> StepWork:
        return decode_work(self.batch, self.context)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that one step computes."""
        return self.batch

    def lengths(self, steps: int) -> tuple[int, ...]:
        """Return the tokens of each sequence after `steps` steps."""
        return (self.context + steps - 1,) * self.batch

    def slices(self, step: int, tables: Sequence[tuple[BlockId, ...]], vocab_size: int) -> tuple[ScheduledSlice, ...]:
        """Return the slices of plan number `step`, counted from 0.

        From the second plan on, the input of each sequence is the token that the plan before samples.
        """
        params = SamplingParams(max_tokens=step + 1, temperature=0.0)
        return tuple(
            ScheduledSlice(
                SeqId(i + 1),
                self.context - 1 + step,
                1,
                () if step else (i % vocab_size,),
                table,
                Sampling(params, 0, step),
                chained=step > 0,
            )
            for i, table in enumerate(tables)
        )


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Case of prefill steps: each computes the same `rows` tokens of one prompt after `cached` tokens, and samples
    nothing."""

    rows: int
    cached: int

    def __str__(self) -> str:
        return f"prefill {self.rows} on {self.cached}"

    @property
    def work(self) -> StepWork:
        return chunk_work(self.rows, self.cached)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that one step computes."""
        return self.rows

    def lengths(self, steps: int) -> tuple[int, ...]:
        """Return the tokens of the sequence, which do not depend on the number of steps."""
        return (self.cached + self.rows,)

    def slices(self, step: int, tables: Sequence[tuple[BlockId, ...]], vocab_size: int) -> tuple[ScheduledSlice, ...]:
        """Return the slices of a plan, which are the same in every plan."""
        ids = tuple((7919 * i + 1) % vocab_size for i in range(self.rows))
        return (ScheduledSlice(SeqId(1), self.cached, self.rows, ids, tables[0], None),)


StepCase = Decode | PlannedChunk


class Unfit(Exception):
    """Raised when a case needs more than the executor has; the message says of what."""


def tables_of(case: StepCase, steps: int, layout: KVLayout, num_blocks: int) -> list[tuple[BlockId, ...]]:
    """Return a block table for each sequence of a case, long enough for `steps` steps. Raises Unfit."""
    counts = [layout.num_blocks_for(length) for length in case.lengths(steps)]
    if sum(counts) > num_blocks:
        raise Unfit(f"needs {sum(counts)} blocks of KV, the pool has {num_blocks}")
    order = list(range(num_blocks))
    random.Random(_SEED).shuffle(order)
    free = iter(order)
    return [tuple(BlockId(next(free)) for _ in range(count)) for count in counts]


def plans_of(
    case: StepCase, first_number: int, steps: int, tables: Sequence[tuple[BlockId, ...]], vocab_size: int
) -> Iterator[StepPlan]:
    """Yield the plans of `steps` steps, each made when it is requested, while the plan before it runs."""
    for step in range(steps):
        yield StepPlan(first_number + step, case.slices(step, tables, vocab_size))


def time_steps(executor: Executor, plans: Iterator[StepPlan], clock: Clock) -> list[float]:
    """Measure the seconds of each step.

    For an executor without a pipeline they are the duration of `execute`. With a pipeline the next plan is launched
    before a step ends, and a step counts from the end of the step before it. Raises RuntimeError when a slice fails.
    """
    if not isinstance(executor, Pipelined):
        return [_executed(executor, plan, clock) for plan in plans]
    seconds: list[float] = []
    ended = clock.now()
    plan = next(plans, None)
    if plan is not None:
        executor.launch(plan)
    while plan is not None:
        plan = next(plans, None)
        if plan is not None:
            executor.launch(plan)
        _require(executor.collect())
        ended, before = clock.now(), ended
        seconds.append(ended - before)
    return seconds


def fill(pool: torch.Tensor) -> None:
    """Fill a KV pool with random numbers.

    A pool stored as bytes stays as it is, because its scales would be random too.
    """
    if not pool.dtype.is_floating_point:
        return
    flat = pool.view(-1)
    for start in range(0, flat.numel(), _FILLED_AT_ONCE):
        flat[start : start + _FILLED_AT_ONCE].normal_()


def _executed(executor: Executor, plan: StepPlan, clock: Clock) -> float:
    began = clock.now()
    _require(executor.execute(plan))
    return clock.now() - began


def _require(result: StepResult) -> None:
    for piece in result.slices:
        if piece.error is not None:
            raise RuntimeError(f"step {result.number} failed: {piece.error}")
