"""Own the memory of the KV pool and of the host cache, and copy, clear and digest its blocks."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockId, HostSlot
from tandem.kv.host_offload import Offload, Onload
from tandem.kv.layout import KVLayout, KVRegion
from tandem.runtime.device import torch_dtype
from tandem.runtime.device_stream import DeviceStream
from tandem_kernels.contract import FLOAT8, LayerKV
from tandem_kernels.dispatch import BlockDigestOp
from tandem_kernels.reference import block_digest

_WORD_BYTES = 8
_TRIAL_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 divided by the golden ratio, as a signed number. It is odd, so that all words of a trial block differ."""


class KVCache:
    """KV pool of one rank in device memory, and the host memory that its blocks are offloaded to.

    It copies, clears and digests blocks; models read and write `layers`. `pool`: a tensor `[num_blocks,
    *share.block_shape()]`, initially zeros. `layers`: views of the pool, one for each layer. `layout`: layout of a
    block of the whole model. `heads`: range of the KV heads that this rank holds; without tensor parallelism all.
    `share`: layout of this rank's part of a block, which has only these heads. `host`: a tensor `[num_host_slots,
    *share.block_shape()]`, which no step reads. Behind the pool lie further blocks, which only bandwidth probes read
    and write, see `KVRegion`. Invariant: slots of a block that hold no token contain finite numbers, see `clear`."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_digest: BlockDigestOp = block_digest,
        num_host_slots: int = 0,
        heads: range | None = None,
        aside: DeviceStream | None = None,
    ) -> None:
        """Allocate pool and host memory.

        `layout`: layout of a block of the whole model. `heads`: KV heads that this rank holds; None: all. `aside`:
        stream for work that runs concurrently with steps; the pool is allocated on its device, by default the CPU.
        Raises TandemError when the host memory cannot be locked for the GPU."""
        self.layout = layout
        self.heads = range(layout.group.heads) if heads is None else heads
        self.share = layout.for_rank(self.heads)
        self.num_blocks = num_blocks
        self.num_host_slots = num_host_slots
        self._block_digest = block_digest
        self._aside = aside or DeviceStream()
        share, device = self.share, self._aside.device
        number = num_blocks + 2 * share.num_probe_blocks
        self._memory = _blocks(share, number) if device.type == "cpu" else _device_blocks(share, number, device)
        self.pool = self._memory[:num_blocks]
        self.host = _blocks(share, num_host_slots) if device.type == "cpu" else _pinned(share, num_host_slots)
        self.layers = tuple(_layer(self.pool, share, i) for i in range(layout.group.layers))

    @property
    def region(self) -> KVRegion:
        """Return address, sizes and device of the pool's memory, with which a transport registers it.

        The address is valid as long as this object lives."""
        return KVRegion(
            address=self.pool.data_ptr(),
            num_blocks=self.num_blocks,
            block_bytes=self.share.block_bytes,
            head_start=self.heads.start,
            head_stop=self.heads.stop,
            device=str(self.pool.device),
            num_probe_blocks=self.share.num_probe_blocks,
        )

    def clear(self, blocks: Sequence[BlockId]) -> None:
        """Fill blocks with zeros; to be called for blocks that a step will write only in part.

        Attention multiplies the empty slots of a block by zero, and zero times an infinity left by an earlier owner of
        the block is NaN."""
        for block in blocks:
            self.pool[block].zero_()

    def copy(
        self, spills: Sequence[Offload], fills: Sequence[Onload], copies: Sequence[tuple[BlockId, BlockId]]
    ) -> None:
        """Copy whole blocks: first `spills` from the pool to host memory, then `fills` from host memory back to the
        pool, then `copies` within the pool.

        These are the fields of `StepPlan`: pairs (block, host slot), (host slot, block) and (source, target). On a GPU
        the copies are asynchronous and run in order on the current stream."""
        for block, slot in spills:
            self.host[slot].copy_(self.pool[block], non_blocking=True)
        for slot, block in fills:
            self.pool[block].copy_(self.host[slot], non_blocking=True)
        for source, target in copies:
            self.pool[target].copy_(self.pool[source])

    def host_view(self, slot: HostSlot) -> memoryview:
        """Return a view of a host slot's bytes, which the caller may read and write while no copy uses the slot."""
        content = self.host[slot].view(torch.uint8).numpy()
        return memoryview(content.data).cast("B")

    def digest_host(self, slots: Sequence[HostSlot]) -> list[tuple[int, ...]]:
        """Return the digests of the blocks in the host slots `slots`: for each slot, one unsigned 64-bit number per KV
        head of this rank.

        A digest depends on the block's index in its prompt; here it is computed as if every block had index 0. May be
        called on any thread."""
        digest = self._block_digest if self.pool.device.type == "cpu" else block_digest
        return unsigned(digest(self.host, torch.tensor(slots), torch.zeros(len(slots), dtype=torch.int64)))

    def fill_trial_blocks(self) -> list[tuple[int, ...]]:
        """Write the trial blocks, whose content is the same in every pool with this layout, and return their digests.

        Other workers read these blocks to measure bandwidth, and check what they read by the digests. The result has
        one tuple per trial block, with one digest for each KV head of the model. The digests of trial block i are
        computed as if it were block i of a prompt."""
        start, digests = self.num_blocks, []
        index = torch.zeros(1, dtype=torch.int64, device=self.pool.device)
        for number in range(self.share.num_probe_blocks):
            block = trial_block(self.layout, number, self.pool.device)
            self._memory[start + number].copy_(block[0, self.heads.start : self.heads.stop])
            digests += unsigned(self._block_digest(block, index, index + number))
        return digests

    def digest(self, blocks: Sequence[BlockId], indices: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the digests of blocks: for each a tuple with one unsigned 64-bit number per KV head of the model.

        `indices`: for each block its index in its prompt, which the digest depends on. Waits for the device."""
        return unsigned(self.digest_on_device(*self._places(blocks, indices)))

    def digest_on_device(self, blocks: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Compute on the pool's device what `digest` returns, without waiting for the device.

        `blocks`: int64 `[n]`. `indices`: int64 `[n]`, the index of each block in its prompt. The result is int64
        `[n, heads]`, to be read as unsigned 64-bit numbers.
        """
        return self.digest_own_on_device(blocks, indices)

    def digest_here(self, blocks: Sequence[BlockId], indices: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the digests of blocks as `digest` does, but only for the KV heads that this rank holds.

        The work runs on the stream `aside`, so the method may be called during a step for blocks that the step does not
        write."""
        with self._aside.running():
            return unsigned(self.digest_own_on_device(*self._places(blocks, indices)))

    def digest_own_on_device(self, blocks: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Compute on the device what `digest_on_device` returns, but only for the KV heads that this rank holds."""
        return self._block_digest(self._memory, blocks, indices, head_start=self.heads.start)

    def _places(self, blocks: Sequence[BlockId], indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.pool.device
        return torch.tensor(blocks, device=device), torch.tensor(indices, device=device)

    def __repr__(self) -> str:
        sizes = f"{self.pool.nbytes >> 20} MiB, {self.host.nbytes >> 20} MiB in host memory"
        return f"{type(self).__name__}({self.num_blocks} blocks of {self.share}, {sizes})"


def unsigned(words: torch.Tensor) -> list[tuple[int, ...]]:
    """Convert int64 digests `[n, heads]` to one tuple of unsigned Python integers for each of the n blocks.

    Waits for the device."""
    return [tuple(row) for row in words.cpu().numpy().view(np.uint64).tolist()]


def trial_block(layout: KVLayout, number: int, device: torch.device) -> torch.Tensor:
    """Build trial block `number`, a block of known content that other workers read to measure bandwidth, for all KV
    heads.

    The result is a tensor `[1, *layout.block_shape()]` on `device`. Its content is a function of `layout` and `number`,
    and differs in each head."""
    heads = layout.group.heads
    words = torch.arange(layout.head_bytes // _WORD_BYTES, dtype=torch.int64, device=device) * _TRIAL_STEP
    starts = torch.arange(number * heads + 1, (number + 1) * heads + 1, dtype=torch.int64, device=device)
    return (words + starts[:, None]).view(torch.uint8).view(_dtype(layout)).view(1, *layout.block_shape())


def _layer(pool: torch.Tensor, layout: KVLayout, index: int) -> LayerKV:
    """Return views of one layer's keys and values in the pool, and of their scales if the layout has any."""
    key, value = pool[:, :, index, 0], pool[:, :, index, 1]
    if not layout.group.is_scaled:
        return LayerKV(key, value)
    shape = (*key.shape[:-1], layout.block_size, layout.group.head_dim)
    values, scales = ([tile[..., part] for tile in (key, value)] for part in _parts(layout))
    return LayerKV(*(tile.view(FLOAT8).view(shape) for tile in values), *(tile.view(torch.float32) for tile in scales))


def _parts(layout: KVLayout) -> tuple[slice, slice]:
    """Return the byte ranges of the values and of the scales within a scaled tile."""
    num_bytes = layout.block_size * layout.group.head_dim
    return slice(num_bytes), slice(num_bytes, None)


def _dtype(layout: KVLayout) -> torch.dtype:
    return torch.uint8 if layout.group.is_scaled else torch_dtype(layout.group.dtype)


def _device_blocks(layout: KVLayout, number: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(number, *layout.block_shape(), dtype=_dtype(layout), device=device)


def _pinned(layout: KVLayout, number: int) -> torch.Tensor:
    """Allocate pinned host memory for `number` blocks, registered with CUDA until the process ends.

    torch's own pinned allocator would round the size up to a power of two. Raises TandemError when the memory cannot be
    locked."""
    memory = _blocks(layout, number)
    if number:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if code:
            what = f"{memory.nbytes >> 20} MiB of host memory for the GPU (CUDA error {code})"
            message = f"cannot lock {what}: lower engine.host_cache_memory"
            raise TandemError(ErrorKind.UNSUPPORTED, message, param="host_cache_memory")
    return memory


def _blocks(layout: KVLayout, number: int) -> torch.Tensor:
    """Allocate zeroed host memory, `[number, *layout.block_shape()]`."""
    dtype = _dtype(layout)
    if not number:
        return torch.zeros(0, *layout.block_shape(), dtype=dtype)
    # An anonymous mapping is page-aligned, and its zeros cost neither time nor memory before a block is first used.
    # It is private because shared memory gets no huge pages; with them copies and digests of blocks were up to three
    # times as fast. The tensor keeps the mapping alive.
    memory = mmap.mmap(-1, number * layout.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(number, *layout.block_shape())
