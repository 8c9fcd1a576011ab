"""Compare predicted prefix hits with those that workers report, and find workers whose index entries are wrong.

A single short hit is expected, because KV events arrive some milliseconds late. A worker whose hits fall short
repeatedly holds other blocks than the index says.
"""

from __future__ import annotations

from typing import NamedTuple

from tandem.core.ids import WorkerRef

SUSPECT_AFTER = 3
"""Number of reports in a row with fewer cached tokens than predicted after which a worker's index entries count as
wrong."""


class Prediction(NamedTuple):
    """A predicted prefix hit: `worker` holds the `num_tokens` tokens of a prompt that follow its first `num_before`
    tokens.

    `num_before` is above 0 only for a worker from which a prefix is fetched: the worker that computes the prompt has
    the first `num_before` tokens in its own cache. Both numbers are multiples of `block_size`, which is in tokens too.
    """

    worker: WorkerRef
    num_tokens: int
    block_size: int
    num_before: int = 0


def predict(
    worker: WorkerRef, num_blocks: int, num_prompt_tokens: int, block_size: int, num_before: int = 0
) -> Prediction:
    """Return the prediction that `worker` holds the blocks of a prompt from block `num_before` up to block
    `num_blocks`. `num_prompt_tokens`: length of the prompt; `block_size`: in tokens.

    `num_before` is 0 unless a prefix is fetched from `worker`; then the worker that computes the prompt has the first
    `num_before` blocks in its own cache. The last token of a prompt is always computed, so a block that contains it
    does not count.
    """
    most = (num_prompt_tokens - 1) // block_size
    before = min(num_before, most)
    return Prediction(worker, (min(num_blocks, most) - before) * block_size, block_size, before * block_size)


class PrefixAccuracy:
    """Detect workers that hold less than the prefix index predicts, and count for metrics how often that happens.

    `num_predicted`: tokens that were predicted to be cached. `num_missed`: those of them that were not. Both only grow.
    """

    def __init__(self) -> None:
        self.num_predicted = 0
        self.num_missed = 0
        self._num_short_in_a_row: dict[WorkerRef, int] = {}

    def reported(self, predicted: Prediction, num_cached: int) -> bool:
        """Compare a prediction with a worker's report that `num_cached` tokens of the prompt did not have to be
        computed.

        Returns True when `predicted.worker` has fallen short of its predictions by more than one block for the third
        time in a row: its entries in the prefix index are probably wrong. A difference of one block is ignored, because
        that block may just have been evicted.
        """
        num_found = max(0, num_cached - predicted.num_before)
        self.num_predicted += predicted.num_tokens
        self.num_missed += max(0, predicted.num_tokens - num_found)
        if num_found >= predicted.num_tokens - predicted.block_size:
            if predicted.num_tokens > predicted.block_size:
                self.forget(predicted.worker)
            return False
        count = self._num_short_in_a_row.get(predicted.worker, 0) + 1
        self._num_short_in_a_row[predicted.worker] = count
        if count < SUSPECT_AFTER:
            return False
        self.forget(predicted.worker)
        return True

    def forget(self, worker: WorkerRef) -> None:
        """Forget how often in a row a worker had fewer cached tokens than predicted, because it has restarted or is
        gone."""
        self._num_short_in_a_row.pop(worker, None)
