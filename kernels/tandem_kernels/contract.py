"""What every kernel takes, yields and does at its edges; computes nothing itself.

Names of sizes: T query rows of a step, S sequences of a step, H query heads, G KV heads (H a multiple of G),
D head size, B slots per block, N blocks of the pool, L layers.

The KV pool is one contiguous tensor `[N, G, L, 2, B, D]` (2 = key, value). Kernels of one layer take its two planes
as the views `pool[:, :, l, 0]` and `pool[:, :, l, 1]`, each `[N, G, B, D]`: tiles `[B, D]` are contiguous, heads lie a
whole number of tiles apart, and blocks G times as far as heads. A *slot* is `block * B + offset`.

rms_norm(x, weight, eps) -> like x
    `x` is `[..., D']`, `weight` `[D']` of the same dtype. The mean of squares and the scaling are taken in float32
    whatever the dtype of `x` (float64 too: this is what the checkpoints' reference implementation does), rounded to
    the dtype of `x`, then multiplied by `weight` in it. No rows: no rows.

rope_tables(positions, inv_freq, scale, dtype) -> (cos, sin)
    `positions` int64 `[T]`, `inv_freq` float32 `[D / 2]`; both results are `[T, D]` of `dtype`, halves repeated.
    Angles, cosines and the product with `scale` are float32.

rope(x, cos, sin) -> like x
    `x` is `[T, heads, D]`. Component i pairs with i + D/2 (not with its neighbour). Computed in the dtype of `x`.

cache_write(key, value, key_cache, value_cache, slots) -> None
    `key`, `value` `[T, G, D]`; `slots` int64 `[T]`, all different, all inside the pool. Writes exactly those slots.

paged_attention(query, key_cache, value_cache, batch, scale) -> [T, H, D]
    Causal attention of rows that may be whole prompts, chunks or single decode rows, in any mixture; see
    `AttentionBatch`. Query head h reads KV head `h // (H / G)`. The rows' own keys and values are in the cache before
    the call. Scores, softmax and the weighted sum accumulate in float32 for half types, else in the dtype itself.
    A row attends to at least itself. Sequences without rows are not listed; S = 0 yields `[0, H, D]`.
    Slots at or after a sequence's context and blocks that only pad a table take no part in the result, but must
    hold finite numbers, because an implementation may load them and weigh them with zero.

block_digest(pool, block_ids, block_indices) -> int64 [n, G]
    `block_ids` int64 `[n]`, places in the pool; `block_indices` int64 `[n]`, logical places in the prompt.
    The 64 bits of a result are to be read as unsigned. With all arithmetic modulo 2**64, `>>` on a signed word
    copying its sign bit, and w_j the j-th little-endian 64-bit word of the slab `pool[block, head]`:

        x_j    = (w_j ^ (j * DIGEST_WORD)) * DIGEST_MULTIPLIER
        sum    = sum over j of (x_j ^ (x_j >> 32))
        digest = sum + (head + 1) * DIGEST_HEAD + (block_index + 1) * DIGEST_BLOCK

    The sum is free in its order, so it may run in parallel; the word index inside it makes a swap of layers, planes
    or tokens show, the last line a slab that is right but in another head's or block's place. It guards against
    mistakes and lost writes, not against an adversary. A slab whose bytes are no multiple of 8 is refused
    (ValueError). Heads are numbered as in `pool`; a pool that holds a range of a model's heads is to pass
    `head_start`, so that digests agree between different splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PLANES = 2


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


DIGEST_WORD = _signed(0x9E3779B97F4A7C15)
DIGEST_MULTIPLIER = _signed(0xBF58476D1CE4E5B9)
DIGEST_HEAD = _signed(0x94D049BB133111EB)
DIGEST_BLOCK = _signed(0xD6E8FEB86659FD93)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which rows belong to which sequence, and where its KV lies.

    `query_starts` int32 `[S + 1]`: rows `[query_starts[i], query_starts[i + 1])` are sequence i's, at least one each,
    and are the last rows of its context. `context_lens` int32 `[S]`: tokens with KV, the new rows included.
    `block_tables` int32 `[S, W]`: entry j holds tokens `[j * B, (j + 1) * B)`; a row's entries after the last one that
    its context needs only pad and repeat a block of the same sequence. All three live in host memory.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor

    @property
    def num_sequences(self) -> int:
        return self.context_lens.numel()
