"""The KV pool's memory and views of it, and the host memory beside it; never decides which block is whose."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np
import torch

from tandem.core.ids import BlockId
from tandem.kv.host_pool import Fill, Spill
from tandem.kv.layout import KVLayout, KVRegion
from tandem.runtime.device import torch_dtype
from tandem_kernels.contract import FLOAT8, LayerKV
from tandem_kernels.dispatch import BlockDigest
from tandem_kernels.reference import block_digest


class KVCache:
    """One zeroed tensor `pool` `[num_blocks, *share.block_shape()]`, and `layers`, the planes of each.

    `layout` is the whole model's; `share` that of the `heads` which this rank holds, all of them without tensor
    parallelism. `host` is a tensor `[num_host_slots, *share.block_shape()]` that no step reads. Invariant: a slot of a
    block that holds no token is finite, see `clear`.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_digest: BlockDigest = block_digest,
        num_host_slots: int = 0,
        heads: range | None = None,
    ) -> None:
        self.layout = layout
        self.heads = range(layout.group.heads) if heads is None else heads
        self.share = layout.share(self.heads)
        self.num_blocks = num_blocks
        self.num_host_slots = num_host_slots
        self._block_digest = block_digest
        self.pool = _blocks(self.share, num_blocks)
        self.host = _blocks(self.share, num_host_slots)
        self.layers = tuple(_layer(self.pool, self.share, i) for i in range(layout.group.layers))

    @property
    def region(self) -> KVRegion:
        """Where a transport finds the blocks; valid as long as this object lives."""
        return KVRegion(
            address=self.pool.data_ptr(),
            num_blocks=self.num_blocks,
            block_bytes=self.share.block_bytes,
            head_start=self.heads.start,
            head_stop=self.heads.stop,
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

    def spill(self, copies: Sequence[Spill]) -> None:
        """Copy whole blocks to host memory."""
        for block, slot in copies:
            self.host[slot].copy_(self.pool[block])

    def fill(self, copies: Sequence[Fill]) -> None:
        """Copy whole blocks back from it."""
        for slot, block in copies:
            self.pool[block].copy_(self.host[slot])

    def digest(self, blocks: Sequence[BlockId], indices: Sequence[int]) -> list[tuple[int, ...]]:
        """Unsigned 64-bit digests per KV head of `blocks`, which are the `indices`-th of their prompt."""
        return self.digest_here(blocks, indices)

    def digest_here(self, blocks: Sequence[BlockId], indices: Sequence[int]) -> list[tuple[int, ...]]:
        """`digest` of the heads that this rank holds; other threads may call it while steps run."""
        return unsigned(self.digest_words(blocks, indices))

    def digest_words(self, blocks: Sequence[BlockId], indices: Sequence[int]) -> torch.Tensor:
        """`digest_here` as int64 `[len(blocks), len(heads)]` with the same bits."""
        ids, places = torch.tensor(blocks), torch.tensor(indices)
        return self._block_digest(self.pool, ids, places, head_start=self.heads.start)

    def __repr__(self) -> str:
        sizes = f"{self.pool.nbytes >> 20} MiB, {self.host.nbytes >> 20} MiB in host memory"
        return f"{type(self).__name__}({self.num_blocks} blocks of {self.share}, {sizes})"


def unsigned(words: torch.Tensor) -> list[tuple[int, ...]]:
    """Rows of digests as contracts have them."""
    return [tuple(row) for row in words.cpu().numpy().view(np.uint64).tolist()]


def _layer(pool: torch.Tensor, layout: KVLayout, index: int) -> LayerKV:
    key, value = pool[:, :, index, 0], pool[:, :, index, 1]
    if not layout.group.is_scaled:
        return LayerKV(key, value)
    shape = (*key.shape[:-1], layout.block_size, layout.group.head_dim)
    values, scales = ([tile[..., part] for tile in (key, value)] for part in _parts(layout))
    return LayerKV(*(tile.view(FLOAT8).view(shape) for tile in values), *(tile.view(torch.float32) for tile in scales))


def _parts(layout: KVLayout) -> tuple[slice, slice]:
    """Of a scaled tile its numbers' bytes and its scales'."""
    num_bytes = layout.block_size * layout.group.head_dim
    return slice(num_bytes), slice(num_bytes, None)


def _blocks(layout: KVLayout, number: int) -> torch.Tensor:
    """`[number, *layout.block_shape()]`, zeros."""
    dtype = torch.uint8 if layout.group.is_scaled else torch_dtype(layout.group.dtype)
    if not number:
        return torch.zeros(0, *layout.block_shape(), dtype=dtype)
    # Mapped rather than allocated: zeros that cost neither time nor memory before a block is first used, and a region
    # that begins with a page. Private, because shared memory gets no huge pages: with them copies and digests of blocks
    # were up to three times as fast. The tensor keeps the mapping.
    memory = mmap.mmap(-1, number * layout.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(number, *layout.block_shape())
