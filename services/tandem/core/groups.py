"""Puts values together that are alike; never changes or orders them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def group_by(given: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """By what `key` tells of each, in the order in which they came."""
    found: dict[K, list[T]] = {}
    for one in given:
        found.setdefault(key(one), []).append(one)
    return found
