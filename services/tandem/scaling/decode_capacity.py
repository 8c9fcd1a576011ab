"""How many sequences a worker decodes at once without being too slow or full, and how many workers that makes; never
looks at prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from tandem.core.step_cost import StepFeatures
from tandem.scaling.cluster_state import WorkerCapacity

KV_SHARE = 0.9
"""Of a worker's blocks, to be filled on average: lengths differ, and what does not fit is computed again."""


@dataclass(frozen=True, slots=True)
class DecodeDemand:
    """`rate` of sequences per second, each of `num_steps` steps at which it attends to `context` tokens on average.
    `dispersion`: variance by mean of how many there are at once, 1 where they come independently."""

    rate: float
    num_steps: float
    context: float
    dispersion: float = 1.0


def step_s(worker: WorkerCapacity, batch: float, context: float) -> float:
    """Seconds of a step that decodes `batch` sequences of so much context each."""
    alone = worker.cost.predict(StepFeatures())
    return alone + batch * _each_s(worker, context)


def is_in_reach(worker: WorkerCapacity, context: float, itl_s: float) -> bool:
    """Whether a step of one sequence takes `itl_s` at most: where it takes longer no number of workers helps."""
    return worker.cost.base_s + _each_s(worker, context) <= itl_s


def largest_batch(worker: WorkerCapacity, context: float, itl_s: float | None) -> int:
    """Sequences of a step that takes `itl_s` at most, where that is in reach, fit into the KV blocks and may run; 1 at
    least."""
    num_blocks = max(1.0, context / worker.block_size)
    most = min(float(worker.max_num_seqs), KV_SHARE * worker.num_blocks / num_blocks)
    each_s = _each_s(worker, context)
    if itl_s is not None and each_s > 0 and is_in_reach(worker, context, itl_s):
        most = min(most, (itl_s - worker.cost.base_s) / each_s)
    return max(1, math.floor(most))


def mean_batch(worker: WorkerCapacity, work: DecodeDemand, num_workers: int) -> float:
    """Sequences that one of so many workers decodes at a time: as many steps per second as come make a batch, and the
    larger a batch the longer a step (Little's law). Infinite where more comes than can be done."""
    pace = work.rate * work.num_steps / num_workers
    left = 1 - pace * _each_s(worker, work.context)
    return pace * worker.cost.base_s / left if left > 0 else math.inf


def decode_workers(
    worker: WorkerCapacity, work: DecodeDemand, itl_s: float | None, tolerated: float, headroom: float
) -> tuple[int, float]:
    """The fewest workers, and how many sequences they decode at once. In the middle a batch leaves `headroom` of the
    largest; with random numbers at once, all batches together exceed it for the share `tolerated` of the time."""
    if work.rate * work.num_steps <= 0:
        return 0, 0.0
    most = largest_batch(worker, work.context, itl_s)
    beyond = NormalDist().inv_cdf(1 - tolerated)
    # Below, not even batches without an end keep up.
    number = math.floor(work.rate * work.num_steps * _each_s(worker, work.context)) + 1
    while True:
        together = number * mean_batch(worker, work, number)
        peak = together + beyond * math.sqrt(together * work.dispersion)
        if together <= (1 - headroom) * most * number and peak <= most * number:
            return number, together
        number += 1


def _each_s(worker: WorkerCapacity, context: float) -> float:
    return worker.cost.decode_seq_s + worker.cost.decode_context_s * context
