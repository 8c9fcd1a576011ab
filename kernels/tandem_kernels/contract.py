"""What every kernel takes, yields and does at its edges; computes nothing itself.

Names of sizes: T query rows of a step, S sequences of a step, H query heads, G KV heads (H a multiple of G),
D head size, B slots per block, N blocks of the pool, L layers. A *slot* is `block * B + offset`.

The KV pool is one contiguous tensor whose blocks are `[G, L, 2, tile]` (2 = key, value). A *tile* holds B slots of D
numbers and, where those are `float8_e4m3fn`, B float32 scales after them. Kernels of one layer take its planes as the
views of `LayerKV`, whose tiles `[B, D]` are contiguous; heads lie a whole number of tiles apart, and blocks G times as
far as heads. A pool may be larger than 2**31 elements: offsets are 64 bits wide.

Tensors of one call are on one device. Unless it says otherwise a kernel takes no rows as well as many, keeps the dtype
of its rows, and reads and writes nothing that is not named.

A kernel is *batch-invariant* if a row's result has the same bits whichever rows are beside it in a call, and in
`paged_attention` wherever the chunk begins that the row is computed in.

linear(x, weight, bias) -> [T, out]
    `x @ weight.T + bias` of `x` `[T, in]`, contiguous `weight` `[out, in]` and `bias` `[out]` (None: no bias), all of
    one dtype. Products accumulate in float32 for half types; the sum is rounded once, or before the bias as well.

rms_norm(x, weight, eps) -> like x
    `x` is `[..., D']`, `weight` `[D']` of the same dtype. The mean of squares and the scaling are taken in float32
    whatever the dtype of `x` (float64 too: this is what the checkpoints' reference implementation does), rounded to
    the dtype of `x`, then multiplied by `weight` in it.

add_rms_norm(x, residual, weight, eps) -> (like x, like x)
    `total = residual + x` in the dtype of `x`, all `[T, D']`; yields `rms_norm(total, weight, eps)` and `total`.

silu_mul(gate_up) -> [T, I]
    `gate_up` is `[T, 2 * I]`: `silu(gate) * up` of its halves. Silu is computed in float32 for half types, else in the
    dtype itself, and rounded to the dtype before it is multiplied in it.

rope_tables(positions, inv_freq, scale, dtype) -> (cos, sin)
    `positions` int64 `[T]`, `inv_freq` float32 `[D / 2]`; both results are `[T, D]` of `dtype`, halves repeated.
    Angles, cosines and the product with `scale` are float32.

rope(x, cos, sin) -> like x
    `x` is `[T, heads, D]`, `cos` and `sin` are as `rope_tables` yields them, halves repeated. Component i pairs with
    i + D/2 (not with its neighbour). Computed in the dtype of `x`.

cache_write(key, value, kv, slots) -> None
    `key`, `value` `[T, G, D]`; `slots` int64 `[T]`, inside the pool and all different, but for those that are negative,
    whose rows are not written. Writes exactly those slots. Into float8 planes a row of one head is written as
    `float8(x / scale)`, rounded to nearest, ties to even, with `scale = max |x| / 448` in float32, or 1 where that is
    0 or subnormal.

rope_cache_write(qkv, cos, sin, norms, kv, slots) -> query [T, H, D]
    `qkv` is `[T, (H + 2 G) * D]`, query, key and value heads side by side. Each query and key head is normed by
    `norms` (None: not), then turned by `rope`; keys and values are written as `cache_write` does. The query of a row
    whose slot is negative is computed like any other.

paged_attention(query, kv, batch, scale) -> [T, H, D]
    Causal attention of rows that may be whole prompts, chunks or single decode rows, in any mixture; see
    `AttentionBatch`. Query head h reads KV head `h // (H / G)`. The rows' own keys and values are in the cache before
    the call. Scores, softmax and the weighted sum accumulate in float32 for half types, else in the dtype itself;
    a number of a float8 plane is its value times its slot's scale, in float32. A row attends to at least itself.
    Slots at or after a sequence's context and blocks that only pad a table take no part in the result, but must
    hold finite numbers, because an implementation may load them and weigh them with zero.

pack_blocks(pool, block_ids, head_start, head_stop) -> [n, head_stop - head_start, ...]
    Heads `[head_start, head_stop)`, counted in the pool, of blocks `block_ids` int64 `[n]`, as new contiguous memory of
    the pool's dtype.

unpack_blocks(packed, pool, block_ids, head_start) -> None
    The inverse: heads from `head_start` on of blocks, all different, become those of `packed`.

block_digest(pool, block_ids, block_indices, *, head_start=0) -> int64 [n, G]
    `block_ids` int64 `[n]`, places in the pool; `block_indices` int64 `[n]`, logical places in the prompt.
    The 64 bits of a result are to be read as unsigned. With all arithmetic modulo 2**64, `>>` on a signed word
    copying its sign bit, and w_j the j-th little-endian 64-bit word of the slab `pool[block, head]`:

        x_j    = (w_j ^ (j * DIGEST_WORD)) * DIGEST_MULTIPLIER
        sum    = sum over j of (x_j ^ (x_j >> 32))
        digest = sum + (head + 1) * DIGEST_HEAD + (block_index + 1) * DIGEST_BLOCK

    The sum is free in its order, so it may run in parallel; the word index inside it makes a swap of layers, planes
    or tokens show, the last line a slab that is right but in another head's or block's place. It guards against
    mistakes and lost writes, not against an adversary. A slab whose bytes are no multiple of 8 is refused
    (ValueError). Heads are numbered from `head_start` on, the model's number of the pool's first head, so that digests
    agree between different splits.

sample(logits, rows) -> int64 [R]
    One token of each row of `logits` `[R, V]`, by `SamplingRows`; -1 where a row holds a number that is not finite.
    Temperature 0 takes the greatest. Else, in float64: `scaled = (logits - max) / temperature`; top-k keeps the k
    greatest; top-p of what is left the fewest greatest whose share of it reaches p; min-p what is at least
    `log_min_p`; the first id, in ascending order, at which the running sum of `exp(scaled)` over the kept passes
    `u * total` is drawn, where u in [0, 1) is `philox.uniform(seed, choice, index)`. Of equal logits the lower id goes
    first, everywhere. Sums may be taken in any order: a draw may differ where u lies within rounding of a boundary.
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

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0

SCRATCH_BYTES = 256 << 20
"""What a kernel may take for a while beside its results, however many rows it is given."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's planes of the pool: `key`, `value` `[N, G, B, D]`, and `key_scale`, `value_scale` float32
    `[N, G, B]` where those are float8, else None."""

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.key.shape[2]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """`rms_norm` of each query and key head: weights `[D]` and the eps of both."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which rows belong to which sequence, and where its KV lies.

    `query_starts` int32 `[S + 1]`: rows `[query_starts[i], query_starts[i + 1])` are sequence i's, at least one each,
    and are the last rows of its context. `context_lens` int32 `[S]`: tokens with KV, the new rows included; 0 is a
    place that nobody has: its one row yields zeros. `block_tables` int32 `[S, W]`: entry j holds tokens
    `[j * B, (j + 1) * B)`; a row's entries after the last one that its context needs only pad, and name some block of
    the pool. The first `num_decodes` sequences have one row each; no sequence has more than `max_rows`. Both only tell
    an implementation how to divide the work.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    num_decodes: int
    max_rows: int

    @property
    def num_sequences(self) -> int:
        return self.context_lens.numel()


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row of logits is drawn from, `[R]` each: `temperature`, `top_p` (1: all) and `log_min_p` (-inf: all)
    float64, `top_k` (0: all), `choice` and `index` int64, `seed` int64 whose bits are the 64 of an unsigned number."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor
    index: torch.Tensor
