"""Count the free blocks that a pool would have after some tables were released and others were filled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tandem.core.ids import BlockHash, BlockId
from tandem.kv.block_pool import BlockPool, BlockTable


class RoomForecast:
    """Count in `num_free` the blocks of a pool that would be free after the calls of `release` and `fill`.

    The pool itself stays as it is. The forecast is void once the pool changes.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.num_free = pool.num_free
        self._pool = pool
        # Tables that would hold a block in addition to those that do; below 0 for blocks of released tables.
        self._num_added: Counter[BlockId] = Counter()

    def release(self, table: BlockTable) -> None:
        """Release a table of the pool."""
        for block in table.ids():
            self._num_added[block] -= 1
            self.num_free += self._is_free(block)

    def fill(self, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Fill a new table of `num_blocks` blocks, which shares the cached blocks of the leading `hashes`. `num_free`
        is below 0 afterwards where the pool has too few blocks."""
        hits = self._pool.cached(hashes)
        for block in hits:
            self.num_free -= self._is_free(block)
            self._num_added[block] += 1
        self.num_free -= num_blocks - len(hits)

    def _is_free(self, block: BlockId) -> bool:
        return sum(self._pool.holders(block)) + self._num_added[block] == 0
