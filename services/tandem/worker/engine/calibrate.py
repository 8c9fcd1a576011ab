"""Times a few steps before there is work, so that the step-time model begins with this machine; never touches a block
pool and never runs beside an engine.

The steps compute a made-up prompt in the first blocks of the KV memory and decode behind it. No book knows of that:
the blocks hold no token afterwards, and whoever gets one writes each slot before it is read. They also warm the
executor up, which the first request would otherwise do.
"""

from __future__ import annotations

from collections.abc import Iterator

from tandem.core.clock import Clock
from tandem.core.ids import BlockId, SeqId
from tandem.core.request import SamplingParams
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.engine.ports import Executor
from tandem.sched.budget.step_time_model import GENERIC, features, fit
from tandem.sched.phases.job_admission import blocks_for
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.step_plan import Sampling, ScheduledSlice, StepPlan

CALIBRATION_S = 1.0
"""No step begins after half of it; on large models one step may take longer than all of it."""
NUM_TOKENS = 256
CHUNK = 64
NUM_SEQS = 8
NUM_TRIES = 2
"""The shorter counts: whatever disturbs a step makes it longer."""
WARM_UP_S = 60.0
"""What first tries may take longer than second ones, all together: on a GPU kernels are compiled in them, of some ten
kinds, which would otherwise happen in requests."""
RIDGE = 0.02
_GREEDY = Sampling(SamplingParams(max_tokens=1, temperature=0.0), choice=0, index=0)


def calibrate(executor: Executor, clock: Clock, limits: SchedulerLimits) -> StepCost | None:
    """What steps cost here, from the few that `CALIBRATION_S` allows; None when the executor cannot run them."""
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
    """Cheap ones first, and each reads only KV that earlier ones have written."""
    few = min(chunk, 16)
    yield (_slice(0, 0, few, block_size),)
    yield (_slice(0, few - 1, few, block_size, draws=True),)
    # Several sequences in the same blocks write the same KV of the same token to the same slot.
    yield tuple(_slice(i, few - 1, few, block_size, draws=True) for i in range(num_seqs))
    for start in range(0, num_tokens - chunk + 1, chunk):
        yield (_slice(0, start, start + chunk, block_size),)
        yield tuple(_slice(i, start + chunk - 1, start + chunk, block_size, draws=True) for i in range(num_seqs))


def _slice(seq: int, start: int, stop: int, block_size: int, *, draws: bool = False) -> ScheduledSlice:
    return ScheduledSlice(
        seq=SeqId(-1 - seq),
        start=start,
        num_tokens=stop - start,
        tokens=(0,) * (stop - start),
        blocks=tuple(BlockId(i) for i in range(blocks_for(stop, block_size))),
        sampling=_GREEDY if draws else None,
    )
