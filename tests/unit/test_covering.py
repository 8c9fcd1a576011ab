"""Checks that `covering` chooses few rows of a grid of cases and leaves no combination of values out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest

from tests.covering import covering

GRID = list(product(range(4), "abc", (True, False), range(5)))


def _combinations_in(rows: list[Any], strength: int) -> set[Any]:
    return {chosen for row in rows for chosen in combinations(enumerate(row), strength)}


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_covers_all_combinations_with_fewer_rows(strength: int) -> None:
    chosen = covering(GRID, strength)
    assert _combinations_in(chosen, strength) == _combinations_in(GRID, strength)
    assert len(chosen) < len(GRID)


def test_a_grid_of_pairs_takes_few_more_rows_than_its_two_largest_fields_have() -> None:
    assert 4 * 5 <= len(covering(GRID)) <= 4 * 5 + 4


def test_keeps_the_rule_by_which_rows_are_left_out() -> None:
    rows = [row for row in GRID if row[0] != 1 or row[2]]
    chosen = covering(rows)
    assert set(chosen) <= set(rows)
    assert _combinations_in(chosen, 2) == _combinations_in(rows, 2)


def test_chooses_the_same_rows_each_time_in_their_order() -> None:
    chosen = covering(GRID)
    assert chosen == covering(GRID)
    assert chosen == sorted(chosen, key=GRID.index)


def test_takes_dataclasses() -> None:
    @dataclass(frozen=True)
    class Case:
        size: int
        name: str
        is_ragged: bool

    rows = [Case(*values) for values in product((1, 2, 3), "ab", (True, False))]
    chosen = covering(rows)
    assert len(chosen) == 6
    assert {(case.size, case.name) for case in chosen} == set(product((1, 2, 3), "ab"))


def test_rows_of_one_field_are_each_chosen_once() -> None:
    assert covering([("a",), ("b",), ("a",)]) == [("a",), ("b",)]


def test_no_rows_are_chosen_of_none() -> None:
    assert covering(list[tuple[int, int]]()) == []
