"""Draws are functions of their names, even in their ranges."""

from __future__ import annotations

from collections import Counter

import pytest

from tandem.workload import seeded_random


def test_tokens_are_even_over_their_range() -> None:
    drawn = seeded_random.tokens(310_000, 1, "many")
    assert len(drawn) == 310_000
    span = seeded_random.HIGHEST_TOKEN - seeded_random.LOWEST_TOKEN
    tenths = Counter((token - seeded_random.LOWEST_TOKEN) * 10 // span for token in drawn)
    assert tenths.keys() == set(range(10))
    assert all(number == pytest.approx(31_000, rel=0.03) for number in tenths.values())


def test_fewer_tokens_of_the_same_names_begin_more_of_them() -> None:
    assert seeded_random.tokens(20, 1, "a") == seeded_random.tokens(500, 1, "a")[:20]
    assert seeded_random.tokens(20, 1, "a") != seeded_random.tokens(20, 1, "b")
    assert seeded_random.tokens(0, 1, "a") == ()


def test_names_are_told_apart_and_the_order_of_draws_changes_nothing() -> None:
    names = [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0)]
    drawn = {name: seeded_random.uniform(*name) for name in names}
    assert len(set(drawn.values())) == 4
    assert {name: seeded_random.uniform(*name) for name in reversed(names)} == drawn
