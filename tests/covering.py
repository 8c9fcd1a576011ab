"""Chooses few rows of a grid of cases, so that `make test` tries each pair of values and `make nightly` the full grid.

A fault mostly shows where one or two fields have certain values, whatever the other fields are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations
from typing import Any, TypeVar

T = TypeVar("T")


def covering(rows: Sequence[T], strength: int = 2) -> list[T]:
    """Return few of `rows` in which all combinations of `strength` fields' values occur that occur in `rows`.

    A row is a tuple or a dataclass whose fields have hashable values; a dataclass in a row counts by its fields. Each
    step takes the row that adds most combinations, the first of several that add as many: the same rows each time, in
    the order of `rows`.
    """
    missing = [_combinations_of(row, strength) for row in rows]
    chosen: list[int] = []
    while any(missing):
        best = max(range(len(rows)), key=lambda index: len(missing[index]))
        chosen.append(best)
        covered = missing[best]
        missing = [left - covered for left in missing]
    return [rows[index] for index in sorted(chosen)]


def _combinations_of(row: Any, strength: int) -> frozenset[tuple[tuple[int, Any], ...]]:
    """Return the combinations of a row's values, each value with its field's number."""
    values = _values_of(row)
    return frozenset(combinations(enumerate(values), min(strength, len(values))))


def _values_of(row: Any) -> list[Any]:
    values = [getattr(row, field.name) for field in fields(row)] if is_dataclass(row) else row
    return [one for value in values for one in (_values_of(value) if is_dataclass(value) else [value])]
