"""Test that random numbers are functions of their names, uniform in their ranges."""

from __future__ import annotations

from collections import Counter

import pytest

from tandem.workload import seeded_random


def test_tokens_are_uniform_over_their_range() -> None:
    samples = seeded_random.tokens(310_000, 1, "many")
    assert len(samples) == 310_000
    span = seeded_random.HIGHEST_TOKEN - seeded_random.LOWEST_TOKEN
    tenths = Counter((token - seeded_random.LOWEST_TOKEN) * 10 // span for token in samples)
    assert tenths.keys() == set(range(10))
    assert all(number == pytest.approx(31_000, rel=0.03) for number in tenths.values())


def test_fewer_tokens_of_the_same_names_are_a_prefix() -> None:
    assert seeded_random.tokens(20, 1, "a") == seeded_random.tokens(500, 1, "a")[:20]
    assert seeded_random.tokens(20, 1, "a") != seeded_random.tokens(20, 1, "b")
    assert seeded_random.tokens(0, 1, "a") == ()


def test_names_are_distinguished_and_the_order_of_calls_does_not_matter() -> None:
    names = [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0)]
    samples = {name: seeded_random.uniform(*name) for name in names}
    assert len(set(samples.values())) == 4
    assert {name: seeded_random.uniform(*name) for name in reversed(names)} == samples
