"""Test scale-down stabilization, mixed workers and request profiles."""

from __future__ import annotations

import pytest

from tandem.core.step_cost import StepCost
from tandem.scaling.cluster_state import Demand, WorkerCapacity
from tandem.scaling.decision import ReplicaTarget, RoleChange
from tandem.scaling.request_profile import RequestProfile, prompt_work
from tandem.scaling.scaler import StabilizationWindow, clamped, needed_beside_mixed, role_changes


def settled_series(steady: StabilizationWindow, needs: list[int], current: int, begin: float = 0.0) -> list[int]:
    sizes = []
    for i, number in enumerate(needs):
        steady.add(begin + 5.0 * i, number)
        current = steady.settled(current)
        sizes.append(current)
    return sizes


def test_it_grows_at_once_and_shrinks_to_the_highest_need_of_the_window() -> None:
    sizes = settled_series(StabilizationWindow(30.0, 20.0), [3, 5, 4, 2, 2, 2, 3, 2, 2, 2, 2, 2, 2, 2, 2], 1)
    assert sizes == [3, 5, 5, 5, 5, 5, 5, 5, 4, 3, 3, 3, 3, 2, 2]


def test_it_does_not_shrink_before_a_full_window() -> None:
    assert settled_series(StabilizationWindow(30.0, 20.0), [2] * 8, 9) == [9] * 6 + [2] * 2
    steady = StabilizationWindow(30.0, 20.0)
    settled_series(steady, [2] * 5, 9)
    assert settled_series(steady, [2] * 8, 9, begin=100.0) == [9] * 6 + [2] * 2


@pytest.mark.parametrize(
    ("needed", "num_mixed", "rest"),
    [((4, 2), 0, (4, 2)), ((4, 2), 3, (2, 1)), ((4, 2), 6, (0, 0)), ((4, 2), 9, (0, 0)), ((0, 0), 1, (0, 0)),
     ((5, 0), 2, (3, 0)), ((0, 3), 2, (0, 1))],
)  # fmt: skip
def test_a_mixed_worker_replaces_one(needed: tuple[int, int], num_mixed: int, rest: tuple[int, int]) -> None:
    assert needed_beside_mixed(ReplicaTarget(*needed), num_mixed) == rest


def test_roles_change_from_spare_workers_to_missing_ones() -> None:
    now = ReplicaTarget(5, 2)
    assert role_changes(now, ReplicaTarget(3, 4), ReplicaTarget(2, 0)) == (RoleChange("prefill", "decode", 2),)
    assert role_changes(now, ReplicaTarget(3, 3), ReplicaTarget(2, 0)) == (RoleChange("prefill", "decode", 1),)
    assert role_changes(now, ReplicaTarget(8, 1), ReplicaTarget(0, 1)) == (RoleChange("decode", "prefill", 1),)
    assert role_changes(now, ReplicaTarget(3, 2), ReplicaTarget(2, 0)) == ()
    assert role_changes(now, ReplicaTarget(6, 3), ReplicaTarget(0, 0)) == ()


WORKER = WorkerCapacity(
    cost=StepCost(base_s=1e-2, prefill_token_s=1e-4, decode_seq_s=0.0, decode_context_s=0.0, prefill_pair_s=1e-8),
    num_blocks=100, block_size=16, max_num_seqs=8, max_num_batched_tokens=1000,
)  # fmt: skip


def demand(**counts: int) -> Demand:
    some = {"num_requests": 10, "num_input_tokens": 20_000, "num_cached_tokens": 0, "num_output_tokens": 500}
    return Demand(seconds=5.0, **{**some, **counts})


def test_averages_of_arrivals_and_of_served_requests() -> None:
    means = RequestProfile.of(demand(num_served=5, num_cached_tokens=2500, num_prefill_pairs=10_000_000))
    assert (means.num_fresh, means.num_cached, means.num_pairs, means.num_output) == (1500.0, 500.0, 2e6, 100.0)
    assert means.context == 2050.0 and means.cached_share == 0.25
    assert RequestProfile.of(demand()).num_output == 50.0
    assert RequestProfile.of(demand(num_requests=0, num_input_tokens=0)).context == 500 / 2


def test_rejected_requests_do_not_shorten_the_mean_output() -> None:
    few, many = (
        RequestProfile.of(demand(num_requests=number, num_input_tokens=2000 * number, num_served=10))
        for number in (10, 40)
    )
    assert few.num_output == many.num_output == 50.0 and few.num_fresh == many.num_fresh


def test_num_served_is_known_of_all_intervals_or_of_none() -> None:
    """A gateway of the previous version was present for part of the window."""
    window = [demand(), demand(num_served=9), demand(num_served=10)]
    means = RequestProfile.of(window[0] + window[1] + window[2])
    assert (means.num_output, means.num_fresh) == (50.0, 2000.0)
    assert RequestProfile.of(window[1] + window[2]).num_output == 1000 / 19


def test_pairs_determine_the_variation_of_lengths() -> None:
    """Five prompts of 1,000 tokens and five of 3,000: a mean of 2,000, a variance of a million."""
    pairs = 5 * (1000**2 + 3000**2) // 2
    assert RequestProfile.of(demand(num_prefill_pairs=pairs)).length_scv == pytest.approx(0.25)


def test_the_service_demand_of_a_prompt() -> None:
    means = RequestProfile.of(demand(num_prefill_pairs=25_000_000))
    work = prompt_work(WORKER, means, 2.0, 1.0)
    assert work.mean_s == pytest.approx(2 * 1e-2 + 2000 * 1e-4 + 2.5e6 * 1e-8)
    assert work.load == pytest.approx(2 * work.mean_s)
    assert work.service_scv > means.length_scv


def test_numbers_are_bounded() -> None:
    assert [clamped(n, 2, 5) for n in (0, 3, 9)] == [2, 3, 5] and clamped(900, 0, 0) == 900
