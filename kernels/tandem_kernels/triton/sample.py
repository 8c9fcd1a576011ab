"""Draws of tokens from logits on the GPU, all rows of a step at once; never sorts a vocabulary.

Two launches, whatever the rows ask for. `_survey_kernel` reads each logit once, in chunks of the vocabulary: each
chunk's ends, and its weights against its own greatest. `_draw_kernel` has one program a row. A greedy or unfiltered row
reads one chunk more, that which holds the token. A filtered row first finds its threshold, a place in the order of
logits as whole numbers: each pass weighs a few places between the two that it must lie between, and these close in;
chunks whose greatest lies below are left out. It is found when a single logit is left, or equal ones, of which the
lower ids are kept. All sums are float64, in an order that only the size of the vocabulary decides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.contract import SamplingRows
from tandem_kernels.triton.interpret import UNFUSED, widen

# Logits of a chunk; places that a pass weighs; warps of the two kernels. Chunk and places are powers of 2, and as many
# sums as their product lie in the registers of a pass.
_CHUNK, _PLACES = 1024, 8
_SURVEY_WARPS, _DRAW_WARPS = 4, 16

_INF: tl.constexpr = tl.constexpr(float("inf"))
_MASK32: tl.constexpr = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _key(b_logit):
    """Whole numbers in the order of floats: the bits, those under the sign turned round where it is set."""
    if b_logit.dtype.primitive_bitwidth == 64:
        bits = b_logit.to(tl.int64, bitcast=True)
        key = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    elif b_logit.dtype.primitive_bitwidth == 32:
        bits = b_logit.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        bits = b_logit.to(tl.int16, bitcast=True).to(tl.int32)
        key = bits ^ ((bits >> 15) & 0x7FFF)
    return tl.where(key == -1, 0, key)  # -0 is 0


@triton.jit
def _value(b_key, DTYPE: tl.constexpr):
    """The inverse of `_key`, as float64."""
    if DTYPE.primitive_bitwidth == 64:
        bits = b_key ^ ((b_key >> 63) & 0x7FFFFFFFFFFFFFFF)
    elif DTYPE.primitive_bitwidth == 32:
        bits = b_key ^ ((b_key >> 31) & 0x7FFFFFFF)
    else:
        bits = (b_key ^ ((b_key >> 15) & 0x7FFF)).to(tl.int16)
    return widen(bits.to(DTYPE, bitcast=True)).to(tl.float64)


@triton.jit
def _key_of(b_value, DTYPE: tl.constexpr):
    """The key of float64 numbers in DTYPE, or of a neighbour."""
    return _key(b_value if DTYPE.primitive_bitwidth == 64 else b_value.to(tl.float32).to(DTYPE))


@triton.jit
def _uniform(seed, choice, index):
    """`reference.philox.uniform`: Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC
    2011), of 64-bit words that hold 32 bits."""
    seed, choice, index = seed.to(tl.uint64), choice.to(tl.uint64), index.to(tl.uint64)
    c0, c1, c2, c3 = index & _MASK32, index >> 32, choice & _MASK32, index & 0
    k0, k1 = seed & _MASK32, seed >> 32
    for _ in tl.static_range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return (((c0 << 32) | c1) >> 11).to(tl.float64) * (2.0**-53)


@triton.jit
def _survey_kernel(p_logits, p_temperature, p_least, p_greatest, p_sums, row_stride, vocab, CHUNK: tl.constexpr):
    """Of a chunk its least and greatest logit (infinite where one is not finite), and the sum of its weights against
    the latter (of rows with a temperature)."""
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_out = i_row * tl.num_programs(1) + i_chunk
    o_id = i_chunk * CHUNK + tl.arange(0, CHUNK)
    m_id = o_id < vocab
    # [CHUNK]
    b_logit = widen(tl.load(p_logits + i_row * row_stride + o_id, mask=m_id, other=0.0))
    is_finite = tl.abs(b_logit) < _INF
    least = tl.min(tl.where(m_id & is_finite, b_logit, _INF), axis=0).to(tl.float64)
    greatest = tl.max(tl.where(m_id & is_finite, b_logit, -_INF), axis=0).to(tl.float64)
    greatest = tl.where(tl.sum((~is_finite).to(tl.int32), axis=0) > 0, _INF, greatest)
    tl.store(p_least + i_out, least)
    tl.store(p_greatest + i_out, greatest)
    temperature = tl.load(p_temperature + i_row)
    if (temperature > 0) & (greatest < _INF):
        b_weight = tl.where(m_id, tl.exp((b_logit.to(tl.float64) - greatest) / temperature), 0.0)
        tl.store(p_sums + i_out, tl.sum(b_weight, axis=0))


@triton.jit
def _close_in(
    p_row,
    p_greatest,
    vocab,
    top,
    temperature,
    low,
    high,
    num_low,
    target,
    BY_WEIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """(low, high, num_above, weight_above, num_at): the highest place from which on logits reach `target` lies in
    `[low, high)`, where `num_at` logits lie, one or equal ones; above it are so many, of such a weight.

    From `low` on there are `num_low` logits, which reach the target; from `high` on there is none. `target` is a number
    of logits, or with BY_WEIGHT a weight.
    """
    dtype: tl.constexpr = p_row.dtype.element_ty
    # Places are taken between the ends, evenly among numbers and evenly among keys in turn: the former are near where
    # logits are, the latter end for certain.
    o_place = tl.arange(0, PLACES) + 1
    b_share = o_place.to(tl.float64) / (PLACES + 1)
    num_above = tl.full([], 0, tl.int32)
    weight_above = tl.full([], 0.0, tl.float64)
    i_pass = 0
    while (num_low - num_above > 1) & (low + 1 < high):
        least = _value(low, dtype)
        if i_pass % 2 == 0:
            b_place = _key_of(least * (1 - b_share) + _value(high - 1, dtype) * b_share, dtype)
        else:
            step = tl.maximum(high // PLACES - low // PLACES, 1)
            b_place = (low + step * o_place).to(low.dtype)
        # [PLACES], ascending, each between the ends
        b_place = tl.minimum(tl.maximum(b_place, low + 1), high - 1)
        b_counts = tl.zeros([PLACES, CHUNK], dtype=tl.int32)
        b_weights = tl.zeros([PLACES, CHUNK], dtype=tl.float64)
        for i_chunk in range(NUM_CHUNKS):
            if tl.load(p_greatest + i_chunk) >= least:
                o_id = i_chunk * CHUNK + tl.arange(0, CHUNK)
                m_id = o_id < vocab
                # [CHUNK]
                b_logit = tl.load(p_row + o_id, mask=m_id, other=0.0)
                b_key = _key(b_logit)
                is_reached = (b_key[None, :] >= b_place[:, None]) & (m_id & (b_key < high))[None, :]
                b_counts += is_reached.to(tl.int32)
                if BY_WEIGHT:
                    b_weight = tl.exp((widen(b_logit).to(tl.float64) - top) / temperature)
                    b_weights += tl.where(is_reached, b_weight[None, :], 0.0)
        # [PLACES]: sums of one shape over fewer and fewer numbers, so that no rounding makes a later one greater.
        b_count = num_above + tl.sum(b_counts, axis=1)
        b_weight_from = weight_above + tl.sum(b_weights, axis=1)
        reaches = b_weight_from >= target if BY_WEIGHT else b_count >= target
        low = tl.max(tl.where(reaches, b_place, low), axis=0)
        high = tl.min(tl.where(reaches, high, b_place), axis=0)
        num_low = tl.min(tl.where(reaches, b_count, num_low), axis=0)
        num_above = tl.max(tl.where(reaches, num_above, b_count), axis=0)
        weight_above = tl.max(tl.where(reaches, weight_above, b_weight_from), axis=0)
        i_pass += 1
    return low, high, num_above, weight_above, num_low - num_above


@triton.jit
def _weigh(p_row, o_id, m_id, top, temperature, low, high, num_ties, log_min_p, num_seen):
    """Weights of a chunk's tokens, 0 where they are filtered out, and how many from `[low, high)` it has.

    Kept are those from `high` on and the first `num_ties` of the row in `[low, high)`, `num_seen` of which come before
    the chunk, if their logarithm is at least `log_min_p`.
    """
    # [CHUNK]
    b_logit = tl.load(p_row + o_id, mask=m_id, other=0.0)
    b_key = _key(b_logit)
    is_tie = (m_id & (b_key >= low) & (b_key < high)).to(tl.int32)
    is_kept = (b_key >= high) | ((is_tie > 0) & (num_seen + tl.cumsum(is_tie, axis=0) <= num_ties))
    b_scaled = (widen(b_logit).to(tl.float64) - top) / temperature
    is_kept = m_id & is_kept & (b_scaled >= log_min_p)
    return tl.where(is_kept, tl.exp(b_scaled), 0.0), tl.sum(is_tie, axis=0)


@triton.jit
def _chunk_sums(
    p_row,
    p_greatest,
    vocab,
    top,
    temperature,
    low,
    high,
    num_ties,
    log_min_p,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """`[CHUNKS]` each: what `_weigh` keeps of each chunk, and how many of the row's ties come before it."""
    dtype: tl.constexpr = p_row.dtype.element_ty
    o_chunk = tl.arange(0, CHUNKS)
    b_sums = tl.zeros([CHUNKS], dtype=tl.float64)
    b_seen = tl.zeros([CHUNKS], dtype=tl.int32)
    least = _value(low, dtype)
    num_seen = tl.full([], 0, tl.int32)
    for i_chunk in range(NUM_CHUNKS):
        b_seen = tl.where(o_chunk == i_chunk, num_seen, b_seen)
        greatest = tl.load(p_greatest + i_chunk)
        if (greatest >= least) & ((greatest - top) / temperature >= log_min_p):
            o_id = i_chunk * CHUNK + tl.arange(0, CHUNK)
            b_weight, found = _weigh(
                p_row, o_id, o_id < vocab, top, temperature, low, high, num_ties, log_min_p, num_seen
            )
            b_sums = tl.where(o_chunk == i_chunk, tl.sum(b_weight, axis=0), b_sums)
            num_seen += found
    return b_sums, b_seen


@triton.jit
def _draw_kernel(
    p_logits,
    p_temperature,
    p_top_k,
    p_top_p,
    p_log_min_p,
    p_seed,
    p_choice,
    p_index,
    p_least,
    p_greatest,
    p_sums,
    p_tokens,
    row_stride,
    vocab,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    dtype: tl.constexpr = p_logits.dtype.element_ty
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_row * row_stride
    p_greatest += i_row * NUM_CHUNKS
    o_chunk = tl.arange(0, CHUNKS)
    m_chunk = o_chunk < NUM_CHUNKS
    o_lane = tl.arange(0, CHUNK)
    # [CHUNKS]
    b_greatest = tl.load(p_greatest + o_chunk, mask=m_chunk, other=-_INF)
    top = tl.max(b_greatest, axis=0)
    temperature = tl.load(p_temperature + i_row)
    token = tl.full([], -1, tl.int64)
    if top < _INF:
        if temperature == 0:
            o_id = tl.min(tl.where(b_greatest == top, o_chunk, CHUNKS), axis=0) * CHUNK + o_lane
            # [CHUNK]
            b_logit = widen(tl.load(p_row + o_id, mask=o_id < vocab, other=0.0)).to(tl.float64)
            token = tl.min(tl.where((o_id < vocab) & (b_logit == top), o_id, vocab), axis=0).to(tl.int64)
        else:
            top_k = tl.load(p_top_k + i_row)
            top_p = tl.load(p_top_p + i_row)
            log_min_p = tl.load(p_log_min_p + i_row)
            # [CHUNKS]
            b_least = tl.load(p_least + i_row * NUM_CHUNKS + o_chunk, mask=m_chunk, other=_INF)
            # [CHUNKS]
            b_sums = tl.load(p_sums + i_row * NUM_CHUNKS + o_chunk, mask=m_chunk, other=0.0)
            b_sums *= tl.exp((b_greatest - top) / temperature)
            b_seen = tl.zeros([CHUNKS], dtype=tl.int32)
            # Until a filter says otherwise all is kept: `[low, low)` is nothing.
            low = _key_of(tl.min(b_least, axis=0), dtype)
            end = _key_of(top, dtype) + 1
            high = low
            num_low = tl.full([], 0, tl.int32) + vocab
            num_ties = tl.full([], 0, tl.int32)
            has_top_k = (top_k > 0) & (top_k < vocab)
            if has_top_k:
                low, high, num_above, _weight, num_at = _close_in(
                    p_row, p_greatest, vocab, top, temperature, low, end, num_low, top_k,
                    False, CHUNK, NUM_CHUNKS, PLACES,
                )  # fmt: skip
                num_ties = (top_k - num_above).to(tl.int32)
                num_low = num_above + num_at
            if has_top_k & (top_p < 1):
                b_sums, b_seen = _chunk_sums(
                    p_row, p_greatest, vocab, top, temperature, low, high, num_ties, -_INF, CHUNK, NUM_CHUNKS, CHUNKS
                )
            if top_p < 1:
                target = top_p * tl.sum(b_sums, axis=0)
                edge = low
                low, high, num_above, weight_above, num_at = _close_in(
                    p_row, p_greatest, vocab, top, temperature, low, end, num_low, target,
                    True, CHUNK, NUM_CHUNKS, PLACES,
                )  # fmt: skip
                # Of equal logits as many as the target needs, at least one and no more than top-k left.
                each = tl.exp((_value(low, dtype) - top) / temperature)
                num_left = tl.where(has_top_k & (low == edge), num_ties, num_at)
                num_needed = tl.maximum(tl.ceil((target - weight_above) / each), 1.0)
                num_ties = tl.minimum(num_needed, num_left.to(tl.float64)).to(tl.int32)
            if has_top_k | (top_p < 1) | (log_min_p > -_INF):
                b_sums, b_seen = _chunk_sums(
                    p_row, p_greatest, vocab, top, temperature, low, high, num_ties, log_min_p,
                    CHUNK, NUM_CHUNKS, CHUNKS,
                )  # fmt: skip
            number = _uniform(tl.load(p_seed + i_row), tl.load(p_choice + i_row), tl.load(p_index + i_row))
            b_running = tl.cumsum(b_sums, axis=0)
            aim = number * tl.max(b_running, axis=0)
            # The first chunk in which the running sum passes the aim; where no rounding lets it, the last with weight.
            has_weight = b_sums > 0
            chunk = tl.min(tl.where(has_weight & (b_running > aim), o_chunk, CHUNKS), axis=0)
            chunk = tl.where(chunk < CHUNKS, chunk, tl.max(tl.where(has_weight, o_chunk, 0), axis=0))
            before = tl.sum(tl.where(o_chunk == chunk - 1, b_running, 0.0), axis=0)
            num_seen = tl.sum(tl.where(o_chunk == chunk, b_seen, 0), axis=0)
            o_id = chunk * CHUNK + o_lane
            b_weight, _found = _weigh(
                p_row, o_id, o_id < vocab, top, temperature, low, high, num_ties, log_min_p, num_seen
            )
            passes = (b_weight > 0) & (before + tl.cumsum(b_weight, axis=0) > aim)
            first = tl.min(tl.where(passes, o_id, vocab), axis=0)
            last = tl.max(tl.where(b_weight > 0, o_id, 0), axis=0)
            token = tl.where(first < vocab, first, last).to(tl.int64)
    tl.store(p_tokens + i_row, token)


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """See `tandem_kernels.contract`."""
    count, vocab = logits.shape
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if not count:
        return tokens
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_chunks = triton.cdiv(vocab, _CHUNK)
    least, greatest, sums = torch.empty((3, count, num_chunks), dtype=torch.float64, device=logits.device)
    _survey_kernel[(count, num_chunks)](
        logits,
        rows.temperature,
        least,
        greatest,
        sums,
        logits.stride(0),
        vocab,
        CHUNK=_CHUNK,
        num_warps=_SURVEY_WARPS,
        **UNFUSED,
    )
    _draw_kernel[(count,)](
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.log_min_p,
        rows.seed,
        rows.choice,
        rows.index,
        least,
        greatest,
        sums,
        tokens,
        logits.stride(0),
        vocab,
        CHUNK=_CHUNK,
        NUM_CHUNKS=num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        PLACES=_PLACES,
        num_warps=_DRAW_WARPS,
        **UNFUSED,
    )
    return tokens
