"""Plans made by hand, and how long an executor takes for them; never schedules a request.

Blocks lie in random order, and the KV of contexts that nobody computed is random: attention over zeros would be faster.
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
    """An executor that takes its next plan while one runs; the oldest is collected first."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...


class ModelExecutor(Executor, Protocol):
    """An executor of a model that is at hand."""

    @property
    def cache(self) -> KVCache: ...

    @property
    def model(self) -> CausalModel: ...

    @property
    def max_model_len(self) -> int:
        """In tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Decode:
    """`batch` sequences draw a token each, greedily; the first step's rows attend to `context` tokens."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"decode {self.batch} x {self.context}"

    @property
    def work(self) -> StepWork:
        return decode_work(self.batch, self.context)

    @property
    def num_tokens(self) -> int:
        """Of one step."""
        return self.batch

    def lengths(self, steps: int) -> tuple[int, ...]:
        """Tokens of each sequence after so many steps."""
        return (self.context + steps - 1,) * self.batch

    def slices(self, step: int, tables: Sequence[tuple[BlockId, ...]], vocab_size: int) -> tuple[ScheduledSlice, ...]:
        """Of the `step`-th plan; after the first, each goes on with the token drawn before."""
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
    """`rows` of one prompt after `cached` tokens, again and again; nothing is drawn."""

    rows: int
    cached: int

    def __str__(self) -> str:
        return f"prefill {self.rows} on {self.cached}"

    @property
    def work(self) -> StepWork:
        return chunk_work(self.rows, self.cached)

    @property
    def num_tokens(self) -> int:
        """Of one step."""
        return self.rows

    def lengths(self, steps: int) -> tuple[int, ...]:
        """Tokens of the sequence, however many steps."""
        return (self.cached + self.rows,)

    def slices(self, step: int, tables: Sequence[tuple[BlockId, ...]], vocab_size: int) -> tuple[ScheduledSlice, ...]:
        """The same in every plan."""
        ids = tuple((7919 * i + 1) % vocab_size for i in range(self.rows))
        return (ScheduledSlice(SeqId(1), self.cached, self.rows, ids, tables[0], None),)


StepCase = Decode | PlannedChunk


class Unfit(Exception):
    """A case asks for more than the executor has; says of what."""


def tables_of(case: StepCase, steps: int, layout: KVLayout, num_blocks: int) -> list[tuple[BlockId, ...]]:
    """Block tables for `steps` steps. Raises Unfit."""
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
    """Plans are made while others run, as a driver makes them."""
    for step in range(steps):
        yield StepPlan(first_number + step, case.slices(step, tables, vocab_size))


def time_steps(executor: Executor, plans: Iterator[StepPlan], clock: Clock) -> list[float]:
    """Seconds of each step: of its `execute`, or where the executor can, from the end of the one before to its own end,
    with the next plan already launched. Raises RuntimeError when a slice fails."""
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
    """Random KV in every block. A pool of bytes, whose scales would be random too, stays as it is."""
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
