"""Compute causal attention over paged KV.

The KV of a sequence is gathered into dense memory once for all of its rows. Decode rows are computed together for
sequences whose tables have a similar length, so that padding costs less than a factor of two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tandem_kernels.contract import AttentionBatch, LayerKV
from tandem_kernels.reference.cache import gather


def paged_attention(query: torch.Tensor, kv: LayerKV, batch: AttentionBatch, scale: float) -> torch.Tensor:
    """Return the causal attention `[T, H, D]` of the query rows to the KV of their sequences in the pool. The exact
    result is defined in `tandem_kernels.contract`."""
    # Float8 planes are dequantised to float32, so everything is computed in float32.
    rows_in = query if kv.key_scale is None else query.to(torch.float32)
    out = torch.zeros_like(rows_in)
    tables = batch.block_tables.to(torch.int64)
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    buckets: dict[int, list[int]] = {}
    for i, context in enumerate(lens):
        rows = slice(starts[i], starts[i + 1])
        width = -(-context // kv.block_size)
        if rows.stop - rows.start == 1:
            if context:
                buckets.setdefault((width - 1).bit_length(), []).append(i)
            continue
        keys, values = (both[0, :, :context] for both in _gather(kv, tables[i : i + 1, :width]))
        out[rows] = _chunk(rows_in[rows], keys, values, scale)
    for members in buckets.values():
        width = max(-(-lens[i] // kv.block_size) for i in members)
        keys, values = _gather(kv, tables[members, :width])
        rows_of = batch.query_starts[members].to(torch.int64)
        out[rows_of] = _decode(rows_in[rows_of], keys, values, batch.context_lens[members], scale)
    return out.to(query.dtype)


def _gather(kv: LayerKV, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gather(kv.key, kv.key_scale, tables), gather(kv.value, kv.value_scale, tables)


def _chunk(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend from rows `[T, H, D]` at the end of a context to its `keys`, `values` `[G, C, D]`; returns `[T, H, D]`."""
    rows, heads, dim = query.shape
    groups, context, _ = keys.shape
    # KV heads are the batch dimension and the query heads of a KV head the head dimension, so that expand copies
    # nothing.
    q = query.view(rows, groups, heads // groups, dim).permute(1, 2, 0, 3)
    k = keys[:, None].expand(-1, heads // groups, -1, -1)
    v = values[:, None].expand(-1, heads // groups, -1, -1)
    if rows == context:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        last = torch.arange(context - rows, context)[:, None]
        mask = query.new_zeros((rows, context)).masked_fill_(torch.arange(context) > last, float("-inf"))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(rows, heads, dim)


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lens: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend from one row of each sequence `[S, H, D]` to `keys`, `values` `[S, G, C, D]`; returns `[S, H, D]`."""
    count, heads, dim = query.shape
    groups, context = keys.shape[1], keys.shape[2]
    q = query.view(count, groups, heads // groups, dim)
    beyond = torch.arange(context) >= lens[:, None]
    mask = query.new_zeros((count, context)).masked_fill_(beyond, float("-inf"))[:, None, None]
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(count, heads, dim)
