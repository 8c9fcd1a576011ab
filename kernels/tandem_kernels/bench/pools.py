"""Build KV pools with random content in the two layouts that are compared, and batches over them.

The blocks of a batch are in random order, as in a pool that has been in use for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem_kernels.bench.case import Bench, CaseUnavailable
from tandem_kernels.bench.grid import Shape
from tandem_kernels.contract import FLOAT8, PLANES, AttentionBatch, LayerKV

_FILLED_AT_ONCE = 1 << 28
_SCALE_BYTES = 4
_SCALE = 0.01
"""Scale of float8 pools, which brings values of up to 448 to the magnitude of the other pools' values."""
SEED = 7


@dataclass(frozen=True, slots=True)
class Pool:
    """A KV pool and the views of its layers.

    `memory`: `[N, G, L, 2, ...]`, or `[L, 2, N, G, ...]` if layers are outermost, for N blocks, G KV heads and L
    layers.
    """

    memory: torch.Tensor
    layers: tuple[LayerKV, ...]
    num_blocks: int

    @property
    def layer(self) -> LayerKV:
        """Return the middle layer."""
        return self.layers[len(self.layers) // 2]


def token_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Return the bytes of one token's KV in one layer."""
    scale = _SCALE_BYTES if dtype == FLOAT8 else 0
    return shape.kv_heads * PLANES * (shape.head_dim * dtype.itemsize + scale)


def layers_within(shape: Shape, dtype: torch.dtype, num_tokens: int, num_bytes: int) -> int:
    """Return how many of the model's layers fit a pool of `num_bytes` with `num_tokens` tokens.

    Raises CaseUnavailable if not even one fits."""
    layer_bytes = num_tokens * token_bytes(shape, dtype)
    layers = min(shape.layers, num_bytes // layer_bytes)
    if layers < 1:
        raise CaseUnavailable(f"one layer's KV has {layer_bytes >> 20} MiB, a pool may have {num_bytes >> 20}")
    return layers


def block_pool(bench: Bench, shape: Shape, dtype: torch.dtype, block_size: int, num_blocks: int, layers: int) -> Pool:
    """Build a pool whose blocks are contiguous over all layers: the layout of `tandem_kernels.contract`."""
    lead = (num_blocks, shape.kv_heads, layers, PLANES)
    if dtype == FLOAT8:
        return _float8_pool(bench, shape, block_size, lead)
    memory = torch.empty(*lead, block_size, shape.head_dim, dtype=dtype, device=bench.device)
    _fill(memory)
    return Pool(memory, tuple(LayerKV(memory[:, :, i, 0], memory[:, :, i, 1]) for i in range(layers)), num_blocks)


def layer_pool(bench: Bench, shape: Shape, dtype: torch.dtype, block_size: int, num_blocks: int, layers: int) -> Pool:
    """Build a pool with layers outermost, as in most engines; only the strides of the views differ."""
    lead = (layers, PLANES, num_blocks, shape.kv_heads)
    memory = torch.empty(*lead, block_size, shape.head_dim, dtype=dtype, device=bench.device)
    _fill(memory)
    return Pool(memory, tuple(LayerKV(memory[i, 0], memory[i, 1]) for i in range(layers)), num_blocks)


def batch_over(
    bench: Bench, rows: Sequence[int], contexts: Sequence[int], block_size: int, num_blocks: int
) -> AttentionBatch:
    """Build a batch of sequences with `rows[i]` rows at the end of a context of `contexts[i]` tokens, decodes first."""
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(SEED)).to(torch.int32)
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    first = 0
    for i, count in enumerate(counts):
        tables[i, :count] = order[first : first + count]
        first += count
    starts = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return AttentionBatch(
        query_starts=starts.to(bench.device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=bench.device),
        block_tables=tables.to(bench.device),
        num_decodes=next((i for i, count in enumerate(rows) if count > 1), len(rows)),
        max_rows=max(rows),
    )


def num_blocks_of(contexts: Sequence[int], block_size: int) -> int:
    return sum(-(-context // block_size) for context in contexts)


def normal(bench: Bench, *sizes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return normally distributed random numbers of shape `sizes`, different in each call."""
    return torch.randn(*sizes, device=bench.device).to(dtype)


def _fill(memory: torch.Tensor) -> None:
    flat = memory.view(-1)
    for start in range(0, flat.numel(), _FILLED_AT_ONCE):
        flat[start : start + _FILLED_AT_ONCE].normal_()


def _float8_pool(bench: Bench, shape: Shape, block_size: int, lead: tuple[int, int, int, int]) -> Pool:
    num_blocks, _, layers, _ = lead
    num_values = block_size * shape.head_dim
    tile = num_values + block_size * _SCALE_BYTES
    memory = torch.empty(*lead, tile, dtype=torch.uint8, device=bench.device)
    # Bytes with a clear lowest bit are never NaN: only 0x7f and 0xff are.
    step = max(1, _FILLED_AT_ONCE // memory[0].numel())
    for start in range(0, num_blocks, step):
        block = memory[start : start + step]
        block.copy_(torch.randint(0, 128, block.shape, dtype=torch.uint8, device=bench.device).mul_(2))
    memory[..., num_values:].view(torch.float32).fill_(_SCALE)
    planes = [memory[:, :, i] for i in range(layers)]
    return Pool(memory, tuple(_float8_layer(plane, block_size, shape.head_dim) for plane in planes), num_blocks)


def _float8_layer(planes: torch.Tensor, block_size: int, head_dim: int) -> LayerKV:
    """Return the views of one layer in `planes`, uint8 `[N, G, 2, tile]`."""
    values, scales = planes[..., : block_size * head_dim], planes[..., block_size * head_dim :]
    shape = (*planes.shape[:2], block_size, head_dim)
    key, value = (values[:, :, i].view(FLOAT8).view(shape) for i in range(PLANES))
    key_scale, value_scale = (scales[:, :, i].view(torch.float32) for i in range(PLANES))
    return LayerKV(key, value, key_scale, value_scale)
