"""Compute attention of whole prompts with torch's own kernel, as a baseline for the paged kernels in the bench.

For prompts without a cached context, paged attention is dense attention with indirection, and torch has a tuned kernel
for that on GPUs. Its gain must exceed the cost of gathering the keys and values that were just written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tandem_kernels.contract import AttentionBatch, LayerKV


def prompt_attention(query: torch.Tensor, kv: LayerKV, batch: AttentionBatch, scale: float) -> torch.Tensor:
    """Compute `contract.paged_attention` for sequences whose rows are their whole context, at least one row each.

    It does not synchronise with the host. Prompts are padded to `max_rows`, so work and memory grow with the longest.
    Raises ValueError for float8 planes, because a half type cannot hold their values times their scales.
    """
    if kv.key_scale is not None:
        raise ValueError(f"prompt attention does not support {kv.key.dtype} planes")
    starts, lens = batch.query_starts[:-1].to(torch.int64), batch.context_lens.to(torch.int64)
    # [S, max_rows]. Positions behind the end repeat the last token; no row of the prompt attends to them.
    positions = torch.minimum(torch.arange(batch.max_rows, device=query.device), lens[:, None] - 1)
    blocks = batch.block_tables.gather(1, positions // kv.block_size).to(torch.int64)
    offsets = positions % kv.block_size
    # [S, max_rows, heads, D] -> [S, heads, max_rows, D]
    q = query[starts[:, None] + positions].transpose(1, 2)
    k, v = (plane[blocks, :, offsets].transpose(1, 2) for plane in (kv.key, kv.value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    rows = torch.arange(len(query), device=query.device)
    sequences = torch.repeat_interleave(lens, output_size=len(query))
    return out.transpose(1, 2)[sequences, rows - starts[sequences]]
