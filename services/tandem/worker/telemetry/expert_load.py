"""Measure how evenly a mixture-of-experts model spreads its tokens over the experts, in windows of time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from tandem.core.clock import Clock

WINDOW_S = 60.0
"""Shortest window in seconds; a window ends when the imbalance is next read after this time. In shorter windows tokens
are too few to be spread evenly."""


class ExpertLoad:
    """Read how many tokens each expert of a model has computed, and measure the imbalance between experts in the last
    complete window.

    `read_tokens`: returns by layer how many tokens each expert has computed so far, and raises RuntimeError when the
    device has failed. Methods may be called on any thread.
    """

    def __init__(self, read_tokens: Callable[[], Mapping[int, Sequence[int]]], clock: Clock) -> None:
        self._read_tokens = read_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._first: Mapping[int, Sequence[int]] = {}
        self._ends_at = clock.now()
        self._imbalance: Mapping[int, float] = {}

    def tokens(self) -> Mapping[int, Sequence[int]]:
        """Return by layer how many tokens each expert has computed so far. Returns an empty mapping when the device has
        failed; the engine reports that failure."""
        with suppress(RuntimeError):
            return self._read_tokens()
        return {}

    def imbalance(self) -> Mapping[int, float]:
        """Return by layer how unevenly the experts have computed tokens in the last complete window: 1 if all computed
        equally many, more otherwise (`imbalance_of`). The first window begins with the first call; until it has ended,
        the mapping is empty."""
        with self._lock:
            now = self._clock.now()
            if now >= self._ends_at:
                last = self.tokens()
                self._imbalance = imbalance_of(self._first, last)
                self._first, self._ends_at = last, now + WINDOW_S
            return self._imbalance

    def __repr__(self) -> str:
        return f"ExpertLoad(window ends at {self._ends_at:g}, {self._imbalance})"


def imbalance_of(first: Mapping[int, Sequence[int]], last: Mapping[int, Sequence[int]]) -> dict[int, float]:
    """Return by layer how unevenly the experts have computed tokens between two counts. The value is the number of
    tokens of the expert with the most, divided by the mean of the layer's experts: 1 if all computed equally many.
    Layers that computed no token are left out.

    `first`, `last`: the earlier and the later count; by layer, how many tokens each expert has computed so far.
    """
    found: dict[int, float] = {}
    for layer, counts in last.items():
        computed = [late - early for early, late in zip(first.get(layer, counts), counts, strict=True)]
        if total := sum(computed):
            found[layer] = max(computed) * len(computed) / total
    return found
