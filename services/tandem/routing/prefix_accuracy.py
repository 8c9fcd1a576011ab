"""Compares the prefix hits that were predicted with those that workers report; never says what a hit is worth.

One that falls short now and then is the price of news that is some milliseconds old. A worker that falls short again
and again holds something else than is known of it.
"""

from __future__ import annotations

from typing import NamedTuple

from tandem.core.ids import WorkerRef

DOUBT_AFTER = 3
"""Short reports of one worker in a row."""


class Prediction(NamedTuple):
    """Of a prompt `worker` holds `num_tokens` after the first `num_before`, which somebody else has; both are whole
    blocks of `block_size` tokens."""

    worker: WorkerRef
    num_tokens: int
    block_size: int
    num_before: int = 0


def predict(
    worker: WorkerRef, num_blocks: int, num_prompt_tokens: int, block_size: int, num_before: int = 0
) -> Prediction:
    """What a hit of so many blocks comes to after the first `num_before` of them: the last token of a prompt is
    computed, whatever is held."""
    most = (num_prompt_tokens - 1) // block_size
    before = min(num_before, most)
    return Prediction(worker, (min(num_blocks, most) - before) * block_size, block_size, before * block_size)


class PrefixAccuracy:
    """Counts of tokens, which only grow: predicted, and of these those that were not there."""

    def __init__(self) -> None:
        self.num_predicted = 0
        self.num_missed = 0
        self._in_a_row: dict[WorkerRef, int] = {}

    def reported(self, predicted: Prediction, num_cached: int) -> bool:
        """That prompt was begun, of which `num_cached` tokens were not computed. True: who was to have them is to be
        doubted. A block less says little: it was evicted a moment ago."""
        num_found = max(0, num_cached - predicted.num_before)
        self.num_predicted += predicted.num_tokens
        self.num_missed += max(0, predicted.num_tokens - num_found)
        if num_found >= predicted.num_tokens - predicted.block_size:
            if predicted.num_tokens > predicted.block_size:
                self.forget(predicted.worker)
            return False
        count = self._in_a_row.get(predicted.worker, 0) + 1
        self._in_a_row[predicted.worker] = count
        if count < DOUBT_AFTER:
            return False
        self.forget(predicted.worker)
        return True

    def forget(self, worker: WorkerRef) -> None:
        """Begin anew with a worker, or it is gone."""
        self._in_a_row.pop(worker, None)
