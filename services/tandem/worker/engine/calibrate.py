"""Time a few steps at start-up, so that the step-time model begins with values of this machine.

The steps compute a made-up prompt in the first blocks of the KV memory and decode after it, before an engine uses the
memory. No block pool knows about these writes: the blocks count as empty afterwards, and every slot is written again
before it is read. The steps also warm the executor up, which the first requests would otherwise have to wait for.
"""

from __future__ import annotations

from collections.abc import Iterator

from tandem.core.clock import Clock
from tandem.core.ids import BlockId, SeqId
from tandem.core.request import SamplingParams
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.engine.ports import Executor
from tandem.sched.budget.step_time_model import GENERIC, features, fit
from tandem.sched.state.limits import SchedulerLimits, blocks_for
from tandem.sched.state.step_plan import Sampling, ScheduledSlice, StepPlan

CALIBRATION_S = 1.0
"""Intended duration in seconds: no step begins after half of it. On large models a single step may take longer."""
NUM_TOKENS = 256
"""Prompt length of the calibration, in tokens."""
CHUNK = 64
"""Tokens per prefill step."""
NUM_SEQS = 8
"""Sequences per decode step."""
NUM_TRIES = 2
"""Times that each step is run; the shorter time counts, since disturbances only make a step longer."""
WARM_UP_S = 60.0
"""Seconds by which the first runs of steps, together, may take longer than their second runs without ending the
calibration earlier. On a GPU about ten kinds of kernels are compiled in first runs, which would otherwise happen during
requests."""
RIDGE = 0.02
"""Weight of the generic step cost in the fit: it counts as much as this many measured steps."""
_GREEDY = Sampling(SamplingParams(max_tokens=1, temperature=0.0), choice=0, index=0)


def calibrate(executor: Executor, clock: Clock, limits: SchedulerLimits) -> StepCost | None:
    """Time a few steps on `executor`, and return the coefficients that predict the duration of steps on this machine.

    `clock` measures the steps; `limits` bounds their prompts and batches. Overwrites the executor's first KV blocks, so
    it must be called before an engine uses the executor. Returns None when the executor reports an error for one of the
    steps.
    """
    block_size = executor.layout.block_size
    num_tokens = min(NUM_TOKENS, limits.max_model_len, executor.num_blocks * block_size)
    chunk = min(CHUNK, limits.max_num_batched_tokens, num_tokens)
    num_seqs = min(NUM_SEQS, limits.max_num_seqs)
    until = clock.now() + CALIBRATION_S / 2
    samples: list[tuple[StepFeatures, float]] = []
    number, spare = -1, WARM_UP_S
    for slices in _steps(num_tokens, chunk, num_seqs, block_size):
        if samples and clock.now() >= until:
            break
        times: list[float] = []
        for _ in range(NUM_TRIES):
            began = clock.now()
            result = executor.execute(StepPlan(number, slices))
            times.append(clock.now() - began)
            number -= 1
            if any(piece.error is not None for piece in result.slices):
                return None
        warmed = min(times[0] - min(times), spare)
        spare -= warmed
        until += warmed
        if min(times) > 0:
            samples.append((features(slices), min(times)))
    return fit(samples, GENERIC, RIDGE) if samples else None


def _steps(num_tokens: int, chunk: int, num_seqs: int, block_size: int) -> Iterator[tuple[ScheduledSlice, ...]]:
    """Yield the slices of each step, cheap ones first. Each step reads only KV that earlier ones have written."""
    few = min(chunk, 16)
    yield (_slice(0, 0, few, block_size),)
    yield (_slice(0, few - 1, few, block_size, samples=True),)
    # The sequences share their blocks, which is safe because they write the same KV of the same token to each slot.
    yield tuple(_slice(i, few - 1, few, block_size, samples=True) for i in range(num_seqs))
    for start in range(0, num_tokens - chunk + 1, chunk):
        yield (_slice(0, start, start + chunk, block_size),)
        yield tuple(_slice(i, start + chunk - 1, start + chunk, block_size, samples=True) for i in range(num_seqs))


def _slice(seq: int, start: int, stop: int, block_size: int, *, samples: bool = False) -> ScheduledSlice:
    return ScheduledSlice(
        seq=SeqId(-1 - seq),
        start=start,
        num_tokens=stop - start,
        tokens=(0,) * (stop - start),
        blocks=tuple(BlockId(i) for i in range(blocks_for(stop, block_size))),
        sampling=_GREEDY if samples else None,
    )
