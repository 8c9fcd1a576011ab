"""What one way costs more than another: found in noise that both share, and undecided where noise hides it."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.paired import added


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
