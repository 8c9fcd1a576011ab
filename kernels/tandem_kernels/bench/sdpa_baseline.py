"""Attention of whole prompts by torch's own kernel, for comparison with the paged ones; nothing dispatches to it.

Where no row has a cached context behind it, the paged loop is dense attention with extra steps, and on GPUs torch has
a tuned kernel for that. What it gains must pay for gathering the keys and values that were just written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tandem_kernels.contract import AttentionBatch, LayerKV


def prompt_attention(query: torch.Tensor, kv: LayerKV, batch: AttentionBatch, scale: float) -> torch.Tensor:
    """`contract.paged_attention` where the rows of every sequence are its whole context, at least one.

    Reads nothing back to the host. Prompts are padded to `max_rows`: work and memory grow with the longest. Raises
    ValueError for float8 planes, whose products with scales a half type does not hold.
    """
    if kv.key_scale is not None:
        raise ValueError(f"prompts are not attended to in {kv.key.dtype}")
    starts, lens = batch.query_starts[:-1].to(torch.int64), batch.context_lens.to(torch.int64)
    # [S, max_rows]. A place behind the end repeats the last token; no row of the prompt sees it.
    places = torch.minimum(torch.arange(batch.max_rows, device=query.device), lens[:, None] - 1)
    blocks = batch.block_tables.gather(1, places // kv.block_size).to(torch.int64)
    offsets = places % kv.block_size
    # [S, max_rows, heads, D] -> [S, heads, max_rows, D]
    q = query[starts[:, None] + places].transpose(1, 2)
    k, v = (plane[blocks, :, offsets].transpose(1, 2) for plane in (kv.key, kv.value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    rows = torch.arange(len(query), device=query.device)
    sequences = torch.repeat_interleave(lens, output_size=len(query))
    return out.transpose(1, 2)[sequences, rows - starts[sequences]]
