"""Group values by a key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def group_by(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the values of each key, both in order of first appearance."""
    groups: dict[K, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups
