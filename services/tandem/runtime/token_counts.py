"""Count how often each token occurs in one sequence, incrementally as the output grows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FIRST_CAPACITY = 64


class TokenCounts:
    """Counts how often each token occurs in a sequence's output, for sampling penalties.

    `ids` and `counts` have one entry per distinct token of prompt and output: first the prompt's in ascending order,
    then those that are new in the output, in order of first occurrence. So the cost of a sample does not depend on the
    length of the sequence."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        """Start with the tokens of the prompt, each with a count of 0 because counts are those in the output."""
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
        """Return the number of occurrences of each token of `ids` in the output; 0 for tokens of the prompt only."""
        return self._counts[: self._size]

    def is_prefix_of(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> bool:
        """Return whether these counts can be extended to a sequence with this prompt and output.

        They can if the counted prompt equals `prompt` and the counted output is a prefix of `output`; otherwise the
        sequence must be counted anew."""
        known = self.output
        return (self.prompt is prompt or self.prompt == prompt) and output[: len(known)] == known

    def extend(self, output: tuple[int, ...]) -> None:
        """Count the tokens of `output` that follow the part counted already.

        `output` is the whole output so far and must begin with that part, see `is_prefix_of`."""
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
