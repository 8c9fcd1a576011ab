"""Test how a step's token budget is split, and which leases may be granted."""

from __future__ import annotations

import pytest

from tandem.sched.state.limits import SchedulerLimits, chunk_size, may_offer


def limits(chunked: bool) -> SchedulerLimits:
    return SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=2, max_model_len=32, enable_chunked_prefill=chunked)


@pytest.mark.parametrize(("remaining", "budget", "expected"), [(20, 8, 8), (5, 8, 5), (1, 8, 1), (5, 0, 0), (0, 8, 0)])
@pytest.mark.parametrize("has_prefill", [False, True])
def test_chunks_fill_what_is_left(remaining: int, budget: int, has_prefill: bool, expected: int) -> None:
    assert chunk_size(remaining, budget, has_prefill, limits(True)) == expected


@pytest.mark.parametrize(
    ("remaining", "budget", "has_prefill", "expected"),
    [(20, 8, False, 20), (20, 8, True, 0), (20, 0, False, 0), (5, 8, True, 5), (1, 8, True, 1), (1, 0, False, 0)],
)
def test_without_chunks_a_prompt_is_whole_or_waits(
    remaining: int, budget: int, has_prefill: bool, expected: int
) -> None:
    assert chunk_size(remaining, budget, has_prefill, limits(False)) == expected


@pytest.mark.parametrize(
    ("need", "leased", "reserved", "expected"), [(4, 0, 0, True), (10, 0, 0, True), (4, 3, 3, True), (4, 3, 4, False)]
)
def test_leases_leave_room_for_the_largest_reservation(need: int, leased: int, reserved: int, expected: bool) -> None:
    assert may_offer(need, leased, 10, reserved) is expected


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs", "max_model_len"])
def test_limits_are_at_least_one(name: str) -> None:
    values = {"max_num_batched_tokens": 1, "max_num_seqs": 1, "max_model_len": 1, name: 0}
    with pytest.raises(ValueError, match=name):
        SchedulerLimits(**values)  # type: ignore[arg-type]
