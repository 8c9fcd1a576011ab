"""Count the free blocks that a pool would have after some tables were released and others were filled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tandem.core.ids import BlockHash, BlockId
from tandem.kv.block_pool import BlockPool, BlockTable


class RoomForecast:
    """Forecast in `num_free` how many blocks of a pool would be free if some tables were released and new tables were
    filled.

    At first `num_free` is the number of blocks that are free now. Calls of `release` and `fill` change only this
    forecast, not the pool. The forecast is void once the pool changes.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.num_free = pool.num_free
        self._pool = pool
        # Tables that would hold a block in addition to those that do; below 0 for blocks of released tables.
        self._num_added: Counter[BlockId] = Counter()

    def release(self, table: BlockTable) -> None:
        """Add to `num_free` the blocks that would become free if `table`, a table of the pool, were released."""
        for block in table.ids():
            self._num_added[block] -= 1
            self.num_free += self._is_free(block)

    def fill(self, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Subtract from `num_free` the free blocks that a new table of `num_blocks` blocks would take.

        The table shares the device blocks in which the leading `hashes` are cached. `num_free` is below 0 afterwards
        where the pool has too few blocks.
        """
        hits = self._pool.cached(hashes)
        for block in hits:
            self.num_free -= self._is_free(block)
            self._num_added[block] += 1
        self.num_free -= num_blocks - len(hits)

    def _is_free(self, block: BlockId) -> bool:
        return sum(self._pool.holders(block)) + self._num_added[block] == 0
