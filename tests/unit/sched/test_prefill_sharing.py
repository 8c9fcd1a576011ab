"""Test how prompts share the token budget of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.ids import SeqId
from tandem.core.step_cost import StepCost
from tandem.sched.budget.prefill_sharing import PendingPrefill, prompt_of, redistribute, split_budget
from tandem.sched.budget.step_sizer import FLOOR_TOKENS, LEAST_TOKENS, PrefillBudget
from tandem.sched.state.slo_targets import LatencyTargets
from tests.unit.sched.test_scheduler import add, generate, scheduler, step

COST = StepCost(20e-3, 1e-3, 1e-3, 1e-6, 1e-6)


def prompt(
    arrival: int, num_remaining: int, *, priority: int = 0, start: int = 0, is_late: bool = False, waits: bool = False
) -> PendingPrefill:
    return PendingPrefill(
        seq=SeqId(arrival),
        order=(0, priority, arrival),
        start=start,
        num_remaining=num_remaining,
        is_late=is_late,
        is_waiting=waits,
    )


def shares(prompts: list[PendingPrefill], num_tokens: int) -> dict[int, int]:
    return dict(split_budget(prompts, PrefillBudget(num_tokens)))


def test_one_prompt_gets_it_all() -> None:
    assert shares([prompt(0, 16000)], 512) == {0: 512}
    assert shares([prompt(0, 100)], 512) == {0: 100}
    assert shares([], 512) == {}


def test_a_short_prompt_goes_beside_a_long_one() -> None:
    assert shares([prompt(0, 16000), prompt(1, 200, waits=True)], 512) == {0: 312, 1: 200}
    assert shares([prompt(0, 16000), prompt(1, 400, waits=True)], 512) == {0: 256, 1: 256}


def test_several_long_ones_do_not_keep_a_short_one_out() -> None:
    long = [prompt(i, 16000 - i, waits=i > 1) for i in range(5)]
    assert shares([*long, prompt(9, 200, waits=True)], 512) == {0: 256, 4: 56, 9: 200}


def test_equal_prompts_are_served_one_after_the_other() -> None:
    assert shares([prompt(0, 600), prompt(1, 600, waits=True)], 512) == {0: 512}
    assert shares([prompt(0, 88), prompt(1, 600, waits=True)], 512) == {0: 88, 1: 424}


def test_a_late_prompt_goes_before_a_shorter_one() -> None:
    long, late, short = prompt(0, 16000), prompt(1, 900, is_late=True), prompt(2, 100)
    assert shares([long, late, short], 512) == {0: 256, 1: 256}


def test_lanes_go_before_lengths() -> None:
    assert shares([prompt(5, 400, priority=-1), prompt(1, 100), prompt(0, 90)], 512) == {5: 400, 0: 90, 1: 22}
    assert shares([prompt(5, 4000, priority=-1), prompt(1, 100)], 512) == {5: 512}


def test_a_prompt_does_not_start_with_the_last_few_tokens() -> None:
    assert shares([prompt(0, 505), prompt(1, 600, waits=True)], 512) == {0: 505}
    assert shares([prompt(0, 505), prompt(1, 600)], 512) == {0: 505, 1: 7}
    assert shares([prompt(0, 505), prompt(1, 7, waits=True)], 512) == {1: 7, 0: 505}


def test_the_floor_is_shared_too() -> None:
    """The time budget is zero, and tokens late in a long prompt are expensive."""
    long, short = prompt(0, 16000, start=30000), prompt(1, 200)
    got = split_budget([long, short], PrefillBudget(512, -1.0, COST))
    assert got == {SeqId(0): FLOOR_TOKENS // 2, SeqId(1): FLOOR_TOKENS // 2}


def test_what_a_prompt_that_did_not_start_leaves_goes_to_the_others() -> None:
    started = [prompt(0, 16000), prompt(1, 9000)]
    first = split_budget([*started, prompt(2, 200, waits=True)], PrefillBudget(512))
    assert first == {SeqId(2): 200, SeqId(1): 56, SeqId(0): 256}
    assert redistribute(started, first, PrefillBudget(512)) == {SeqId(1): 256, SeqId(0): 256}
    assert redistribute(started, first, PrefillBudget(312)) == {SeqId(1): 56, SeqId(0): 256}


prompts_of = st.lists(
    st.tuples(
        st.integers(1, 3000), st.sampled_from([-1, 0, 0, 0, 1]), st.integers(0, 5000), st.booleans(), st.booleans()
    ),
    min_size=1,
    max_size=12,
).map(
    lambda rows: [
        prompt(i, remaining, priority=priority, start=start, is_late=late, waits=waits)
        for i, (remaining, priority, start, late, waits) in enumerate(rows)
    ]
)


@given(prompts_of, st.integers(1, 1024))
def test_the_bounds_that_the_module_states(prompts: list[PendingPrefill], num_tokens: int) -> None:
    got = split_budget(prompts, PrefillBudget(num_tokens))
    by_seq = {p.seq: p for p in prompts}
    assert all(1 <= n <= by_seq[seq].num_remaining for seq, n in got.items())
    assert sum(got.values()) <= num_tokens
    oldest = min(prompts, key=lambda p: p.order)
    assert got[oldest.seq] >= min(oldest.num_remaining, num_tokens // 2, (num_tokens + 1) // 2)
    num_expected_tokens = min(num_tokens, sum(p.num_remaining for p in prompts))
    assert sum(got.values()) > num_expected_tokens - 16, "no more is left over than is too little for a start"
    others = sorted(
        (p for p in prompts if p is not oldest),
        key=lambda p: (p.order[1], not p.is_late, p.num_remaining, p.order[2]),
    )
    first = others[0] if others else None
    if first is not None and (first.order[1], not first.is_late, first.num_remaining) < (
        oldest.order[1],
        not oldest.is_late,
        oldest.num_remaining,
    ):
        assert got.get(first.seq, 0) >= min(first.num_remaining, num_tokens // 2)


@given(prompts_of, st.integers(1, 1024), st.floats(-0.1, 1.0))
def test_time_is_kept_unless_the_floor_needs_more(
    prompts: list[PendingPrefill], num_tokens: int, seconds: float
) -> None:
    allowance = PrefillBudget(num_tokens, seconds, COST)
    got = split_budget(prompts, allowance)
    by_seq = {p.seq: p for p in prompts}
    least = min(num_tokens, LEAST_TOKENS, sum(p.num_remaining for p in prompts))
    assert sum(got.values()) >= least, "even those that wait start with so little"
    spent = sum(COST.chunk_s(by_seq[seq].start, n) for seq, n in got.items())
    # One token of the oldest is never refused.
    assert sum(got.values()) <= FLOOR_TOKENS or spent <= seconds + COST.chunk_s(5000, 1)


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_next_to_nothing_goes_to_the_oldest(num_tokens: int) -> None:
    got = shares([prompt(0, 50), prompt(1, 60, waits=True)], num_tokens)
    assert got == ({0: num_tokens} if num_tokens else {})


def test_a_prompt_whose_client_has_a_token_already_is_late() -> None:
    s = scheduler()
    add(s, generate("a", 3, 5))
    (seq,) = s.state.by_key.values()
    assert not prompt_of(seq, 0, LatencyTargets(), 0.0).is_late
    step(s)
    assert seq.num_output == 1 and prompt_of(seq, 0, LatencyTargets(), 0.0).is_late


def test_who_waits_starts_with_an_eighth_of_a_small_step_at_least() -> None:
    assert shares([prompt(0, 56), prompt(1, 600, waits=True)], 64) == {0: 56, 1: 8}
    assert shares([prompt(0, 57), prompt(1, 600, waits=True)], 64) == {0: 57}
