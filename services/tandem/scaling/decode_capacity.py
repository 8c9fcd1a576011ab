"""Compute how many sequences a worker can decode at a time, and how many decode workers a demand needs.

A worker's batch is limited by the latency target and by its KV blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from tandem.scaling.cluster_state import WorkerCapacity

KV_SHARE = 0.9
"""Target mean utilization of a worker's blocks: lengths vary, and sequences that do not fit are recomputed."""


@dataclass(frozen=True, slots=True)
class DecodeDemand:
    """Demand for decoding: `rate` sequences start per second; each has `num_steps` steps, and each step attends to
    `context` tokens on average.

    `dispersion`: variance divided by mean of the number of concurrent sequences; 1 for independent arrivals.
    """

    rate: float
    num_steps: float
    context: float
    dispersion: float = 1.0


def alone_s(worker: WorkerCapacity, context: float) -> float:
    """Return the seconds that `worker` takes for a step that decodes only one sequence, of `context` tokens.

    If a target for the time between tokens is shorter, no number of workers meets it.
    """
    return worker.cost.base_s + _each_s(worker, context)


def largest_batch(worker: WorkerCapacity, context: float, itl_s: float | None) -> int:
    """Return the most sequences of `context` tokens each (prompt and output so far, on average) that one worker can
    decode at a time; at least 1.

    They are at most `max_num_seqs`, and their KV fits into the share `KV_SHARE` of the worker's blocks. A step that
    decodes all of them takes at most `itl_s` seconds; this limit does not apply where `itl_s` is None or a step of even
    one sequence takes longer.
    """
    num_blocks = max(1.0, context / worker.block_size)
    max_batch = min(float(worker.max_num_seqs), KV_SHARE * worker.num_blocks / num_blocks)
    each_s = _each_s(worker, context)
    if itl_s is not None and each_s > 0 and alone_s(worker, context) <= itl_s:
        max_batch = min(max_batch, (itl_s - worker.cost.base_s) / each_s)
    return max(1, math.floor(max_batch))


def mean_batch(worker: WorkerCapacity, demand: DecodeDemand, num_workers: int) -> float:
    """Return the mean number of sequences that each of `num_workers` workers decodes at a time; infinity where the
    demand exceeds what the workers can compute.

    `demand`: the demand for all workers together. By Little's law the batch is the token rate of a worker times the
    duration of its steps. The duration grows with the batch, so the equation is solved for the batch.
    """
    steps_per_s = demand.rate * demand.num_steps / num_workers
    idle_share = 1 - steps_per_s * _each_s(worker, demand.context)
    return steps_per_s * worker.cost.base_s / idle_share if idle_share > 0 else math.inf


def decode_workers(
    worker: WorkerCapacity, demand: DecodeDemand, itl_s: float | None, tolerated: float, headroom: float
) -> tuple[int, float]:
    """Return the fewest workers that the demand needs, and how many sequences they decode together at a time on
    average.

    Returns (0, 0.0) without demand. `itl_s`: target for the time between two tokens, in seconds; None: no target.
    `headroom`: fraction of the largest batch that the mean batch leaves free. `tolerated`: fraction of the time during
    which, by random variation, there may be more sequences than fit.
    """
    if demand.rate * demand.num_steps <= 0:
        return 0, 0.0
    max_batch = largest_batch(worker, demand.context, itl_s)
    deviations = NormalDist().inv_cdf(1 - tolerated)
    # With fewer workers, not even unbounded batches keep up.
    num_workers = math.floor(demand.rate * demand.num_steps * _each_s(worker, demand.context)) + 1
    while True:
        num_concurrent = num_workers * mean_batch(worker, demand, num_workers)
        peak = num_concurrent + deviations * math.sqrt(num_concurrent * demand.dispersion)
        if num_concurrent <= (1 - headroom) * max_batch * num_workers and peak <= max_batch * num_workers:
            return num_workers, num_concurrent
        num_workers += 1


def _each_s(worker: WorkerCapacity, context: float) -> float:
    return worker.cost.decode_seq_s + worker.cost.decode_context_s * context
