"""Test decode batches, and the number of workers that they need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.step_cost import StepCost, StepFeatures
from tandem.scaling.cluster_state import WorkerCapacity
from tandem.scaling.decode_capacity import KV_SHARE, DecodeDemand, decode_workers, largest_batch, mean_batch

WORKER = WorkerCapacity(
    cost=StepCost(base_s=7e-3, prefill_token_s=2e-5, decode_seq_s=3e-5, decode_context_s=4e-8, prefill_pair_s=1e-9),
    num_blocks=10_000,
    block_size=16,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
)
WORK = DecodeDemand(rate=20.0, num_steps=300.0, context=2000.0)


def step_s(batch: float, context: float) -> float:
    cost = WORKER.cost
    return cost.predict(StepFeatures()) + batch * (cost.decode_seq_s + cost.decode_context_s * context)


def test_the_largest_batch_just_keeps_the_target() -> None:
    number = largest_batch(WORKER, 500.0, 15e-3)
    assert step_s(number, 500.0) <= 15e-3 < step_s(number + 1, 500.0)


def test_a_batch_fits_into_the_blocks_and_max_num_seqs() -> None:
    assert largest_batch(WORKER, 2000.0, None) == int(KV_SHARE * 10_000 / 125)
    assert largest_batch(WORKER, 100.0, None) == 256
    assert largest_batch(WORKER, 1e9, 1e-6) == 1


def test_an_unreachable_target_adds_no_workers() -> None:
    """A step of one sequence takes 7.11 ms."""
    assert largest_batch(WORKER, 2000.0, 7.12e-3) == 1
    assert largest_batch(WORKER, 2000.0, 7.1e-3) == largest_batch(WORKER, 2000.0, None)
    assert decode_workers(WORKER, WORK, 1e-3, 0.01, 0.15) == decode_workers(WORKER, WORK, None, 0.01, 0.15)


def test_a_mean_batch_holds_the_steps_that_arrive_during_one() -> None:
    """Little's law: rate of steps = batch / seconds of a step."""
    batch = mean_batch(WORKER, WORK, 3)
    assert batch / step_s(batch, WORK.context) == pytest.approx(20.0 * 300.0 / 3)
    assert mean_batch(WORKER, replace(WORK, rate=1e6), 3) == float("inf")


def test_the_fewest_workers() -> None:
    number, together = decode_workers(WORKER, WORK, 20e-3, 0.01, 0.15)
    most = largest_batch(WORKER, WORK.context, 20e-3)
    assert together <= 0.85 * most * number
    fewer = mean_batch(WORKER, WORK, number - 1) * (number - 1)
    assert fewer > 0.85 * most * (number - 1) or fewer + 2.3 * fewer**0.5 > most * (number - 1)


def test_the_number_of_workers_is_monotonic() -> None:
    number, _ = decode_workers(WORKER, WORK, 20e-3, 0.01, 0.15)
    for worse in (replace(WORK, rate=60.0), replace(WORK, num_steps=900.0), replace(WORK, context=12_000.0)):
        assert decode_workers(WORKER, worse, 20e-3, 0.01, 0.15)[0] > number, worse
    assert decode_workers(WORKER, replace(WORK, dispersion=30.0), 20e-3, 0.01, 0.0)[0] > number
    assert decode_workers(WORKER, WORK, 10e-3, 0.01, 0.15)[0] > number
    assert decode_workers(WORKER, WORK, 20e-3, 0.01, 0.9)[0] > number


def test_outputs_of_one_token_are_not_decoded() -> None:
    assert decode_workers(WORKER, replace(WORK, num_steps=0.0), 20e-3, 0.01, 0.15) == (0, 0.0)
