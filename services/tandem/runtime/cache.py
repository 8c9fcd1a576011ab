"""The KV pool's memory and views of it; never decides which block is whose."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import torch

from tandem.core.ids import BlockId
from tandem.kv.layout import KVLayout, KVRegion
from tandem.runtime.device import torch_dtype
from tandem_kernels.reference import block_digest

BlockDigests = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`contract.block_digest`."""


class KVCache:
    """One zeroed tensor `pool` `[num_blocks, *layout.block_shape()]`, and per layer its key and value planes.

    Invariant: a slot that holds no token is finite, see `clear`.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, block_digest: BlockDigests = block_digest) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._block_digest = block_digest
        # Mapped rather than allocated: zeros that cost neither time nor memory before a block is first used, and a
        # region that begins with a page. Private, because shared memory gets no huge pages: with them copies and
        # digests of blocks were up to three times as fast.
        self._memory = mmap.mmap(-1, num_blocks * layout.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        words = torch.frombuffer(self._memory, dtype=torch_dtype(layout.group.dtype))
        self.pool = words.view(num_blocks, *layout.block_shape())
        self.planes = tuple((self.pool[:, :, i, 0], self.pool[:, :, i, 1]) for i in range(layout.group.layers))

    @property
    def region(self) -> KVRegion:
        """Where a transport finds the blocks; valid as long as this object lives."""
        return KVRegion(
            address=self.pool.data_ptr(),
            num_blocks=self.num_blocks,
            block_bytes=self.layout.block_bytes,
            head_start=0,
            head_stop=self.layout.group.heads,
        )

    def clear(self, blocks: Sequence[BlockId]) -> None:
        """Zero blocks that are about to be filled in part: attention weighs their empty slots with zero, and zero
        times an infinity left by an earlier owner is not zero."""
        for block in blocks:
            self.pool[block].zero_()

    def copy(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks, (from, to); no block is both."""
        if copies:
            sources, targets = zip(*copies, strict=True)
            self.pool[list(targets)] = self.pool[list(sources)]

    def digest(self, blocks: Sequence[BlockId], indices: Sequence[int]) -> list[tuple[int, ...]]:
        """Unsigned 64-bit digests per KV head of `blocks`, which are the `indices`-th of their prompt."""
        words = self._block_digest(self.pool, torch.tensor(blocks), torch.tensor(indices))
        return [tuple(row) for row in words.numpy().view(np.uint64).tolist()]

    def __repr__(self) -> str:
        return f"KVCache({self.num_blocks} blocks of {self.layout}, {self.pool.nbytes >> 20} MiB)"
