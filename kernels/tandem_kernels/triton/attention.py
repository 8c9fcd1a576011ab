"""Check the inputs of paged attention and divide a step's rows between the decode and the prefill kernel."""

from __future__ import annotations

import torch

from tandem_kernels.contract import FLOAT8, AttentionBatch, LayerKV
from tandem_kernels.triton.decode_attention import MAX_PACKED_ROWS, split_attention
from tandem_kernels.triton.prefill_attention import ROW_TILES, chunk_attention

MAX_HEAD_DIM = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def paged_attention(query: torch.Tensor, kv: LayerKV, batch: AttentionBatch, scale: float) -> torch.Tensor:
    """Return the causal attention `[T, H, D]` of the query rows to the KV of their sequences in the pool. The exact
    result is defined in `tandem_kernels.contract`. Raises ValueError when dtypes, sizes or strides are not supported.

    For half types the softmax weights are rounded to the query's dtype before they are multiplied with the values; for
    float8 values always to bfloat16, whose range holds a weight times a scale.

    The result of a decode row does not depend on its batch. The result of rows behind the first `num_decodes` sequences
    depends on the step's longest chunk, which decides the kernel for all of them and its tile height.
    """
    _check(query, kv, scale)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    decodes = range(batch.num_decodes)
    chunks = range(batch.num_decodes, batch.num_sequences)
    if decodes:
        split_attention(query, kv, batch, scale, out, decodes, max_rows=1)
    if chunks:
        if batch.max_rows * (query.shape[1] // kv.key.shape[1]) <= MAX_PACKED_ROWS:
            split_attention(query, kv, batch, scale, out, chunks, batch.max_rows)
        else:
            chunk_attention(query, kv, batch, scale, out, chunks, batch.max_rows)
    return out


def row_attention(query: torch.Tensor, kv: LayerKV, batch: AttentionBatch, scale: float) -> torch.Tensor:
    """Compute the same as `paged_attention`, batch-invariantly: the bits of a row depend only on its query and its
    context.

    Raises ValueError when dtypes, sizes or strides are not supported. One kernel with one tile size computes all rows
    and splits no context, so a few long contexts leave most of a GPU idle.
    """
    _check(query, kv, scale)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    decodes, chunks = range(batch.num_decodes), range(batch.num_decodes, batch.num_sequences)
    # Two launches, because in one launch each decode would get as many programs as the longest chunk has tiles.
    for span, max_rows in ((decodes, 1), (chunks, batch.max_rows)):
        if span:
            chunk_attention(query, kv, batch, scale, out, span, max_rows, ROW_TILES)
    return out


def _check(query: torch.Tensor, kv: LayerKV, scale: float) -> None:
    """Raise ValueError when dtypes, sizes or strides are not supported."""
    _, heads, head_dim = query.shape
    _, groups, block_size, kv_dim = kv.key.shape
    if query.dtype not in _DTYPES:
        raise ValueError(f"attention of {query.dtype} rows: the GPU's kernels take float32, bfloat16 and float16")
    if kv.key.dtype != (query.dtype if kv.key_scale is None else FLOAT8):
        raise ValueError(f"keys are {kv.key.dtype} and rows {query.dtype}: only float8 planes with scales may differ")
    if head_dim > MAX_HEAD_DIM or head_dim != kv_dim or heads % groups:
        raise ValueError(f"{heads} query heads of {head_dim} do not go with {groups} KV heads of {kv_dim}")
    if block_size & (block_size - 1):
        raise ValueError(f"blocks of {block_size} tokens: a power of two is needed")
    if scale <= 0:
        raise ValueError(f"scale is {scale}, not more than 0")
    if query.stride(2) != 1 or (heads > 1 and query.stride(1) != head_dim):
        raise ValueError(f"heads of a query row must lie side by side: strides {query.stride()}")
    strides = kv.key.stride()
    if strides[2:] != (head_dim, 1) or kv.value.stride() != strides:
        raise ValueError(f"not a plane of a KV pool: shape {tuple(kv.key.shape)}, strides {strides}")
