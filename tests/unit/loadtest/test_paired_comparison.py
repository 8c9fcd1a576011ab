"""What one way costs more than another: found in noise that both share, and undecided where noise hides it."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.common.paired_comparison import Timed, added, drift, levelled


def noisy(share: float, noise: float, count: int) -> list[tuple[float, float]]:
    """Rounds on a machine whose speed wanders by half, and of which one in ten is held up by three times its time."""
    chance = np.random.default_rng(3)
    pairs = []
    for speed in chance.uniform(1, 1.5, count):
        off, on = speed * (1 + chance.normal(0, noise, 2))
        held_up = 3.0 if chance.random() < 0.1 else 1.0
        pairs.append((off, on * (1 + share) * held_up))
    return pairs


def test_a_share_is_found_in_a_machine_that_wanders() -> None:
    found = added(noisy(0.02, 0.005, 40))
    assert 0.015 < found.low < found.share < found.high < 0.03
    assert found.verdict(0.03) == "under" and found.verdict(0.01) == "OVER"


def test_noise_that_hides_it_leaves_it_undecided() -> None:
    assert added(noisy(0.03, 0.05, 10)).verdict(0.03) == "not decided"


def test_medians_are_of_each_side() -> None:
    found = added([(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)])
    assert (found.num_pairs, found.off, found.on, found.share, found.low, found.high) == (3, 2.0, 4.0, 1.0, 1.0, 1.0)


def test_nothing_has_no_share() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        added([])


def wandering(share: float, power: float, count: int) -> list[tuple[Timed, Timed]]:
    """Rounds on a machine whose speed is another one each time, beside a yardstick that costs follow by a power."""
    chance = np.random.default_rng(5)
    pairs = []
    for slow in chance.uniform(1, 2, (count, 2)):
        noise = 1 + chance.normal(0, 0.01, (2, 2))
        off, on = (
            Timed(50.0 * ratio * speed**power * noise[0], 0.2 * speed * noise[1])
            for ratio, speed, noise in zip((1.0, 1 + share), slow, noise, strict=True)
        )
        pairs.append((off, on))
    return pairs


def test_the_core_speed_takes_the_machine_s_speed_out() -> None:
    pairs = wandering(0.02, 0.8, 60)
    costs, power = levelled(pairs)
    assert power == pytest.approx(0.8, abs=0.03)
    found, blind = added(costs), added([(off.cost, on.cost) for off, on in pairs])
    assert 0.01 < found.low < found.share < found.high < 0.03
    assert blind.high - blind.low > 5 * (found.high - found.low)


def test_a_constant_core_speed_levels_nothing() -> None:
    pairs = [(Timed(1.0, 0.1), Timed(2.0, 0.2)), (Timed(1.5, 0.1), Timed(3.0, 0.2))]
    costs, power = levelled(pairs)
    assert power == 0.0 and np.allclose(costs, [(1.0, 2.0), (1.5, 3.0)])


def test_without_a_core_speed_costs_stay_as_they_are() -> None:
    costs, power = levelled([(Timed(2.0, 1.0), Timed(3.0, 1.0)), (Timed(4.0, 1.0), Timed(5.0, 1.0))])
    assert power == 0.0 and np.allclose(costs, [(2.0, 3.0), (4.0, 5.0)])
    assert levelled([]) == ([], 0.0)


def test_a_share_is_the_middle_of_any_two() -> None:
    assert added([(1.0, 1.0), (1.0, 4.0), (1.0, 64.0)]).share == pytest.approx(2 ** ((2 + 3) / 2) - 1)


def test_what_a_side_does_to_the_core_speed_is_reported() -> None:
    pairs = [(off, Timed(on.cost, on.core_speed * 1.02)) for off, on in wandering(0.02, 0.8, 60)]
    found = drift(pairs)
    assert found.low < 0.02 < found.high
    costs, _ = levelled(pairs)
    assert added(costs).share == pytest.approx(1.02 / 1.02**0.8 - 1, abs=0.004)
