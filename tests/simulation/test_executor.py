"""Test the step times and tokens of the simulated executor."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from tandem.core.ids import BlockId, HostSlot, SeqId
from tandem.core.request import SamplingParams
from tandem.core.step_cost import StepCost
from tandem.kv.handoff import BlockDigest
from tandem.sched.state.step_plan import Sampling, ScheduledSlice, StepPlan
from tandem.sim.cost.executor import SimExecutor
from tandem.sim.cost.model_shapes import SHAPES
from tandem.sim.cost.residuals import always

COST = StepCost(1.0, 0.1, 0.01, 0.001, 0.0001)
LAYOUT = SHAPES["smollm2-135m"].layout(16)


def sampling(index: int, seed: int = 7) -> Sampling:
    return Sampling(SamplingParams(max_tokens=99, seed=seed), 0, index)


def piece(start: int, tokens: tuple[int, ...], sampled: Sampling | None, num_drafted: int = 0) -> ScheduledSlice:
    return ScheduledSlice(SeqId(0), start, len(tokens), tokens, (BlockId(0),), sampled, num_drafted=num_drafted)


def executor(**settings: object) -> SimExecutor:
    return SimExecutor(LAYOUT, 10, COST.predict, **settings)  # type: ignore[arg-type]


def sampled(one: ScheduledSlice) -> list[int]:
    return [t.id for t in executor().execute(StepPlan(0, (one,))).slices[0].tokens]


def test_a_step_takes_the_time_of_its_model() -> None:
    plan = StepPlan(0, (piece(9, (1,), sampling(0)), piece(4, (1, 2, 3), None)))
    # One decode that attends to 10 tokens; a chunk of 3 from position 4 on, which attends to 5 + 6 + 7.
    assert executor().seconds(plan) == pytest.approx(1.0 + 0.3 + 0.01 + 0.010 + 0.0018)


def test_copies_to_and_from_host_memory_are_added() -> None:
    one = executor(num_host_slots=4, host_copy_s=0.25)
    plan = StepPlan(0, (piece(9, (1,), sampling(0)),))
    copies = {"spills": ((BlockId(1), HostSlot(0)), (BlockId(2), HostSlot(1))), "fills": ((HostSlot(2), BlockId(3)),)}
    assert one.num_host_slots == 4
    assert one.seconds(replace(plan, **copies)) == pytest.approx(one.seconds(plan) + 0.75)
    assert one.seconds(StepPlan(1, (), **copies)) == 0.75, "nothing is computed"


def test_residuals_multiply_and_are_picked_by_seed_worker_and_number() -> None:
    plans = [StepPlan(i, (piece(9, (1,), sampling(0)),)) for i in range(500)]
    base = executor().seconds(plans[0])

    def factors(seed: int, worker: str) -> list[float]:
        one = executor(seed=seed, worker=worker, residuals=always(0.5, 1.0, 2.0))
        return [round(one.seconds(plan) / base, 9) for plan in plans]

    usual = factors(1, "a")
    assert usual == factors(1, "a") and set(usual) == {0.5, 1.0, 2.0}
    assert usual != factors(2, "a") and usual != factors(1, "b")
    assert fmean(usual) == pytest.approx(3.5 / 3, rel=0.1)
    with pytest.raises(ValueError, match="factors above 0"):
        executor(residuals=always(1.0, 0.0))


def test_tokens_depend_on_seed_and_index_and_on_nothing_else() -> None:
    first = sampled(piece(9, (1,), sampling(3)))
    assert sampled(piece(40, (5, 6, 7), sampling(3))) == first != sampled(piece(9, (1,), sampling(4)))
    assert sampled(piece(9, (1,), sampling(3, seed=8))) != first
    assert sampled(piece(9, (1, 2), None)) == []


def test_guesses_count_as_far_as_they_are_right() -> None:
    (a,), (b,), (c,) = (sampled(piece(9, (1,), sampling(i))) for i in range(3))
    assert sampled(piece(9, (1, a, b), sampling(0), num_drafted=2)) == [a, b, c]
    assert sampled(piece(9, (1, a, b + 1), sampling(0), num_drafted=2)) == [a, b]
    assert sampled(piece(9, (1, a + 1, b), sampling(0), num_drafted=2)) == [a]


def test_blocks_that_are_to_be_digested_are_named() -> None:
    one = ScheduledSlice(SeqId(0), 0, 16, (1,) * 16, (BlockId(3),), None, digest_blocks=(BlockId(3),))
    assert executor().execute(StepPlan(0, (one,))).slices[0].digests == (BlockDigest(BlockId(3), ()),)


def test_scored_prompts_get_their_scores() -> None:
    scored = replace(piece(4, (1, 2, 3), None), scored=(2, 3, 9))
    (result,) = executor().execute(StepPlan(0, (scored,))).slices
    assert [score.id for score in result.scores] == [2, 3, 9]


def test_no_stop_token_is_sampled_below_min_tokens() -> None:
    plain = [sampled(piece(9, (1,), sampling(index)))[0] for index in range(6)]
    params = SamplingParams(max_tokens=99, seed=7, min_tokens=4, stop_token_ids=frozenset(plain))
    late = [sampled(piece(9, (1,), Sampling(params, 0, index)))[0] for index in range(6)]
    assert not set(late[:4]) & set(plain) and late[4:] == plain[4:]
    guesses = tuple(late[:5])
    assert sampled(piece(9, (1, *guesses), Sampling(params, 0, 0), num_drafted=5)) == late
