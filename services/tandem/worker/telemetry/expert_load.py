"""Measure how evenly the tokens of a model with experts are spread over them, in windows of time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from tandem.core.clock import Clock

WINDOW_S = 60.0
"""Least seconds of a window; it ends when the imbalance is read next. Few tokens are never spread evenly."""


class ExpertLoad:
    """Read the tokens of each expert, and compare those of the last complete window.

    `read_tokens` returns how many tokens each expert has computed so far, by layer, and raises RuntimeError when the
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
        """Return how many tokens each expert has computed so far, by layer; nothing when the device has failed, which
        the engine reports."""
        with suppress(RuntimeError):
            return self._read_tokens()
        return {}

    def imbalance(self) -> Mapping[int, float]:
        """Return the imbalance of each layer in the last complete window, as `imbalance_of` does; nothing before the
        end of the first, which begins with the first call."""
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
    """Return the most tokens that an expert of each layer computed between two counts, divided by the mean over the
    layer's experts, which is 1 if all computed equally many. Layers without tokens are left out.

    `first`, `last`: tokens by layer and expert.
    """
    found: dict[int, float] = {}
    for layer, counts in last.items():
        computed = [late - early for early, late in zip(first.get(layer, counts), counts, strict=True)]
        if total := sum(computed):
            found[layer] = max(computed) * len(computed) / total
    return found
