"""Causal attention over paged KV; reads the cache, never writes it.

Rows of one sequence share one gather of its KV and one dense attention. Decode rows are batched over sequences whose
tables have a similar length, so that padding costs less than a factor of two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tandem_kernels.contract import AttentionBatch
from tandem_kernels.reference.cache import gather


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """See `tandem_kernels.contract`."""
    out = torch.empty_like(query)
    tables = batch.block_tables.to(torch.int64)
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    block_size = key_cache.shape[2]
    buckets: dict[int, list[int]] = {}
    for i, context in enumerate(lens):
        rows = slice(starts[i], starts[i + 1])
        width = -(-context // block_size)
        if rows.stop - rows.start == 1:
            buckets.setdefault((width - 1).bit_length(), []).append(i)
            continue
        keys = gather(key_cache, tables[i : i + 1, :width])[0, :, :context]
        values = gather(value_cache, tables[i : i + 1, :width])[0, :, :context]
        out[rows] = _chunk(query[rows], keys, values, scale)
    for members in buckets.values():
        width = max(-(-lens[i] // block_size) for i in members)
        table = tables[members, :width]
        keys, values = gather(key_cache, table), gather(value_cache, table)
        rows_of = batch.query_starts[members].to(torch.int64)
        out[rows_of] = _decode(query[rows_of], keys, values, batch.context_lens[members], scale)
    return out


def _chunk(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Rows `[T, H, D]` at the end of a context of `keys`, `values` `[G, C, D]` -> `[T, H, D]`."""
    rows, heads, dim = query.shape
    groups, context, _ = keys.shape
    # KV heads are the batch and the query heads of one KV head its heads, so that nothing is repeated in memory.
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
    """One row of each sequence: `[S, H, D]` over `keys`, `values` `[S, G, C, D]` -> `[S, H, D]`."""
    count, heads, dim = query.shape
    groups, context = keys.shape[1], keys.shape[2]
    q = query.view(count, groups, heads // groups, dim)
    beyond = torch.arange(context) >= lens[:, None]
    mask = query.new_zeros((count, context)).masked_fill_(beyond, float("-inf"))[:, None, None]
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(count, heads, dim)
