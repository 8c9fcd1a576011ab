"""Define the inputs, results and edge cases of every kernel, and the types that they share.

Names of sizes: T query rows of a step, S sequences of a step, H query heads, G KV heads (H a multiple of G),
D head size, B slots per block, N blocks of the pool, L layers. A *slot* is `block * B + offset`.

The KV pool is one contiguous tensor whose blocks are `[G, L, 2, tile]` (2 = key, value). A *tile* holds B slots of D
numbers, followed by B float32 scales if the numbers are `float8_e4m3fn`. Kernels of one layer take its planes as the
views of `LayerKV`, whose tiles `[B, D]` are contiguous. The stride of heads is a multiple of a tile, and the stride of
blocks is G times the stride of heads. A pool may have more than 2**31 elements: offsets are 64 bits wide.

Tensors of one call are on one device. Unless stated otherwise a kernel accepts zero rows, keeps the dtype of its rows,
and reads and writes nothing that is not named.

A kernel is *batch-invariant* if a row's result has the same bits whatever other rows are in the call, and for
`paged_attention` also wherever the row's chunk begins.

to_weight(matrix, device, dtype) -> Weight
    Returns the weight that `linear` and `mix_experts` of the same kernels take for a `CodedMatrix`, on `device`: its
    floats rounded to `dtype`, or `DeviceCodes`, which stand for them.

linear(x, weight, bias) -> [T, out]
    `x @ weight.T + bias` of `x` `[T, in]`, contiguous `weight` `[out, in]` and `bias` `[out]` (None: no bias), all of
    one dtype. Products accumulate in float32 for half types. The sum is rounded once at the end, or once before and
    once after adding the bias. A weight in codes is multiplied as its floats, rounded to the dtype of `x`. If it rounds
    rows, it is multiplied as its float32 numbers, and `x` as `float8(x / scale) * scale`, rounded as `cache_write`
    does; each group of `FLOAT8_GROUP` adjacent components of a row has one scale, the last group may be shorter. The
    sum over a group then has the precision of the device's products of float8 (on Hopper about 14 bits in large steps),
    and is scaled and added in float32.

rms_norm(x, weight, eps) -> like x
    `x` is `[..., D']`, `weight` `[D']` of the same dtype. The mean of squares and the scaling are computed in float32
    whatever the dtype of `x`, float64 included, as in the checkpoints' reference implementation (transformers). The
    result is rounded to the dtype of `x`, then multiplied by `weight` in that dtype.

add_rms_norm(x, residual, weight, eps) -> (like x, like x)
    `total = residual + x` in the dtype of `x`, all `[T, D']`; returns `rms_norm(total, weight, eps)` and `total`.

silu_mul(gate_up) -> [T, I]
    `silu(gate) * up` of the two halves of `gate_up` `[T, 2 * I]`. Silu is computed in float32 for half types, else in
    the dtype itself; it is rounded to the dtype before the multiplication, which is in the dtype.

rope_tables(positions, inv_freq, scale, dtype) -> (cos, sin)
    `positions` int64 `[T]`, `inv_freq` float32 `[D / 2]`; both results are `[T, D]` of `dtype`, halves repeated.
    Angles, cosines and the product with `scale` are float32. Components with a frequency of 0 are not rotated, and not
    multiplied by `scale`.

rope(x, cos, sin) -> like x
    `x` is `[T, heads, D]`, `cos` and `sin` are those of `rope_tables`, halves repeated. Component i is rotated with
    component i + D/2, not with its neighbour. Computed in the dtype of `x`.

cache_write(key, value, kv, slots) -> None
    Writes `key`, `value` `[T, G, D]` to exactly the slots `slots` int64 `[T]`. A row with a negative slot is not
    written; the other slots are inside the pool and all different. Into float8 planes a row of one head is written as
    `float8(x / scale)`, rounded to nearest, ties to even, with `scale = max |x| / 448` in float32, or 1 where that is
    0 or subnormal.

rope_cache_write(qkv, cos, sin, norms, kv, slots) -> query [T, H, D]
    `qkv` is `[T, (H + 2 G) * D]`, query, key and value heads side by side. Each query and key head is normalised by
    `norms` (None: not at all), then rotated by `rope`; keys and values are written as `cache_write` does. The query of
    a row with a negative slot is computed like any other.

paged_attention(query, kv, batch, scale) -> [T, H, D]
    Causal attention of rows that may be whole prompts, chunks or single decode rows, in any mixture; see
    `AttentionBatch`. Query head h reads KV head `h // (H / G)`. The rows' own keys and values are in the cache before
    the call. Scores, softmax and the weighted sum accumulate in float32 for half types, else in the dtype itself;
    a number of a float8 plane is its value times its slot's scale, in float32. A row attends to at least itself.
    Slots at or after the end of a sequence's context and blocks that only pad a table have no effect on the result, but
    must hold finite numbers, because an implementation may load them and multiply them by zero.

pack_blocks(pool, block_ids, head_start, head_stop) -> [n, head_stop - head_start, ...]
    Copies heads `[head_start, head_stop)`, counted in the pool, of blocks `block_ids` int64 `[n]` to new contiguous
    memory of the pool's dtype.

unpack_blocks(packed, pool, block_ids, head_start) -> None
    Copies `packed` back to the heads from `head_start` on of blocks `block_ids`, which are all different; the inverse
    of `pack_blocks`.

block_digest(pool, block_ids, block_indices, *, head_start=0) -> int64 [n, G]
    `block_ids` int64 `[n]` are indices in the pool; `block_indices` int64 `[n]` are the blocks' indices in the prompt.
    The 64 bits of a result are an unsigned number. With all arithmetic modulo 2**64, `>>` on a signed word copying its
    sign bit, and w_j the j-th little-endian 64-bit word of the slab `pool[block, head]`:

        x_j    = (w_j ^ (j * DIGEST_WORD)) * DIGEST_MULTIPLIER
        sum    = sum over j of (x_j ^ (x_j >> 32))
        digest = sum + (head + 1) * DIGEST_HEAD + (block_index + 1) * DIGEST_BLOCK

    The sum may be taken in any order, so it may run in parallel. The word index inside it detects swapped layers,
    planes or tokens; the last line detects a correct slab in the place of another head or block. The digest guards
    against bugs and lost writes, not against an adversary. Raises ValueError for a slab whose bytes are not a multiple
    of 8. Heads are numbered from `head_start` on, the model's index of the pool's first head, so that digests are equal
    under different tensor-parallel splits.

route(logits, bias, routing) -> (experts int64 [T, K], weights [T, K])
    Chooses K of E experts for each row of `logits` `[T, E]`, in ascending order, with their weights. Scores are the
    softmax or the sigmoid of the logits, in float32. The K greatest of `scores + bias` are chosen (`bias` float32 `[E]`
    or None), of equal ones the lower index; where `routing` has groups, only from those groups of adjacent experts
    whose two greatest have the greatest sums. Weights are the chosen scores without the bias, divided by their sum
    where that is asked for, times `scaling`, rounded to the dtype of the logits. Where scores are the softmax of the
    chosen, the greatest logits are chosen.

mix_experts(x, experts, weights, gate_up, down) -> like x
    `x` is `[T, in]`, `gate_up` `[E, 2 * I, in]`, `down` `[E, in, I]`, in floats or codes: for each row the sum, over
    its chosen experts in ascending order, of `weight * (down[e] @ silu_mul(gate_up[e] @ row))`. Each product rounds its
    rows and its result as `linear` does. An expert of -1 is another rank's and adds nothing.

sample(logits, rows) -> int64 [R]
    Samples one token from each row of `logits` `[R, V]` with the parameters `SamplingRows`; -1 for a row with a number
    that is not finite. Temperature 0 takes the greatest logit. Any other temperature is computed in float64 with
    `scaled = (logits - max) / temperature`. Top-k keeps the k greatest; top-p keeps, of what is left, the fewest
    greatest whose probability reaches p; min-p keeps, of what is left, those with `scaled` of at least `log_min_p`. The
    sampled id is the first, in ascending order, at which the running sum of `exp(scaled)` over the kept ids exceeds
    `u * total`, where u in [0, 1) is `philox.uniform(seed, choice, index)`. Among equal logits the lower id goes first,
    everywhere. Sums may be taken in any order: a sample may differ where u lies within rounding of a boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

PLANES = 2


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


DIGEST_WORD = _signed(0x9E3779B97F4A7C15)
DIGEST_MULTIPLIER = _signed(0xBF58476D1CE4E5B9)
DIGEST_HEAD = _signed(0x94D049BB133111EB)
DIGEST_BLOCK = _signed(0xD6E8FEB86659FD93)


def digest_words(pool: torch.Tensor) -> int:
    """Return how many 64-bit words one head's part of a block of `pool` has. Raises ValueError where its bytes are no
    multiple of 8."""
    slab_bytes = pool[0, 0].numel() * pool.element_size()
    if slab_bytes % torch.int64.itemsize:
        raise ValueError(f"a head's part of a block has {slab_bytes} bytes, which is no multiple of 8")
    return slab_bytes // torch.int64.itemsize


FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
FLOAT8_GROUP = 128
"""Adjacent components of a row that share a scale where rows are rounded to float8 for a product."""

SCRATCH_BYTES = 256 << 20
"""Upper bound on a kernel's temporary memory beside its results, whatever the number of rows."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's planes of the pool.

    `key`, `value`: `[N, G, B, D]`. `key_scale`, `value_scale`: float32 `[N, G, B]` if the planes are float8, else
    None."""

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.key.shape[2]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Parameters of `rms_norm` on each query and key head: the weights `query` and `key`, `[D]` each, and `eps` of
    both."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Assignment of a step's rows to sequences, and the location of their KV.

    `query_starts` int32 `[S + 1]`: rows `[query_starts[i], query_starts[i + 1])` are sequence i's, at least one each,
    and are the last rows of its context. `context_lens` int32 `[S]`: tokens with KV, the new rows included; 0 marks a
    padding sequence, whose one row yields zeros. `block_tables` int32 `[S, W]`: entry j is the block of tokens
    `[j * B, (j + 1) * B)`; entries behind a sequence's context are padding and name any block of the pool.
    `num_decodes`: the first so many sequences have one row each. `max_rows`: no sequence has more rows. The last two
    only let an implementation choose how to divide the work.
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
class ExpertRouting:
    """How the logits of a router become choice and weights of experts, see `route`.

    `num_chosen`: experts of a row. `is_normalised`: their weights sum up to `scaling`. `num_groups`, of which
    `num_chosen_groups` may be chosen from: 1 where there are no groups."""

    num_chosen: int
    scores: Literal["softmax", "sigmoid", "softmax of chosen"] = "softmax"
    is_normalised: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of each row of logits; every field is `[R]`.

    `temperature` (0: greedy), `top_p` (1 keeps all) and `log_min_p`, the logarithm of min-p (-inf keeps all), are
    float64; `top_k` (0 keeps all) is int64. The random number of a row depends on `seed` (int64 with the bits of an
    unsigned number), `choice` (index of the request's choice) and `index` (number of the output token), both int64.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor
    index: torch.Tensor
