"""How often each token occurs in one sequence, kept as it grows; never says what follows from that."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FIRST_CAPACITY = 64


class TokenCounts:
    """Different tokens in order of their first occurrence. Arrays have one entry per different token, so that a draw
    costs nothing per token that came before."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        """A prompt's tokens are there, but counted 0 times."""
        self.prompt = prompt
        self.output: tuple[int, ...] = ()
        self._ids: npt.NDArray[np.int64] = np.unique(np.array(prompt, np.int64))
        self._counts = np.zeros(len(self._ids))
        self._size = len(self._ids)
        self._place = dict(zip(self._ids.tolist(), range(self._size), strict=True))

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """How often each of `ids` is in the output."""
        return self._counts[: self._size]

    def begins(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> bool:
        """Whether what is counted is a beginning of this."""
        known = self.output
        return (self.prompt is prompt or self.prompt == prompt) and output[: len(known)] == known

    def grow(self, output: tuple[int, ...]) -> None:
        """Count the rest of an output whose beginning is counted."""
        fresh = output[len(self.output) :]
        self.output = output
        self._reserve(self._size + len(fresh))
        for token in fresh:
            place = self._place.setdefault(token, self._size)
            if place == self._size:
                self._ids[place] = token
                self._size += 1
            self._counts[place] += 1

    def _reserve(self, num_places: int) -> None:
        if num_places > len(self._ids):
            spare = max(_FIRST_CAPACITY, num_places) - self._size + self._size // 2
            self._ids = np.concatenate([self.ids, np.zeros(spare, np.int64)])
            self._counts = np.concatenate([self.counts, np.zeros(spare)])

    def __repr__(self) -> str:
        return f"<{self._size} different tokens, {len(self.output)} of output>"
