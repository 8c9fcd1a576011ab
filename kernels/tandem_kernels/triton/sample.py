"""Sample tokens from logits on the GPU, all rows of a step at once, without sorting the vocabulary.

There are two launches, whatever the sampling parameters. `_chunk_stats_kernel` reads each logit once, in chunks of the
vocabulary, and stores each chunk's least and greatest logit and the sum of its weights relative to the greatest.
`_sample_kernel` has one program per row. A greedy or unfiltered row reads one more chunk, the one that contains the
token. A filtered row first searches its threshold by multi-way bisection on integer keys in the order of logits: each
pass counts the logits above several candidates between the current bounds and narrows the bounds; chunks whose greatest
logit is below the bounds are skipped. The search ends when one logit is left between the bounds, or several equal ones,
of which the lower ids are kept. All sums are float64, in an order that depends only on the size of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.contract import SamplingRows
from tandem_kernels.triton.interpret import UNFUSED, widen

# Logits of a chunk; candidate thresholds of a pass; warps of the two kernels. Both sizes are powers of 2, and a pass
# keeps their product of sums in registers.
_CHUNK, _CANDIDATES = 1024, 8
_STATS_WARPS, _SAMPLE_WARPS = 4, 16

_INF: tl.constexpr = tl.constexpr(float("inf"))
_MASK32: tl.constexpr = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _key(b_logit):
    """Map floats to integers in the same order: their bits, with the bits below the sign inverted if it is set."""
    if b_logit.dtype.primitive_bitwidth == 64:
        bits = b_logit.to(tl.int64, bitcast=True)
        key = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    elif b_logit.dtype.primitive_bitwidth == 32:
        bits = b_logit.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        bits = b_logit.to(tl.int16, bitcast=True).to(tl.int32)
        key = bits ^ ((bits >> 15) & 0x7FFF)
    return tl.where(key == -1, 0, key)  # -0.0 equals 0.0


@triton.jit
def _value(b_key, DTYPE: tl.constexpr):
    """Invert `_key`: return the floats of keys, as float64."""
    if DTYPE.primitive_bitwidth == 64:
        bits = b_key ^ ((b_key >> 63) & 0x7FFFFFFFFFFFFFFF)
    elif DTYPE.primitive_bitwidth == 32:
        bits = b_key ^ ((b_key >> 31) & 0x7FFFFFFF)
    else:
        bits = (b_key ^ ((b_key >> 15) & 0x7FFF)).to(tl.int16)
    return widen(bits.to(DTYPE, bitcast=True)).to(tl.float64)


@triton.jit
def _key_of(b_value, DTYPE: tl.constexpr):
    """Return the keys of float64 numbers rounded to DTYPE, or those of a neighbouring number."""
    return _key(b_value if DTYPE.primitive_bitwidth == 64 else b_value.to(tl.float32).to(DTYPE))


@triton.jit
def _uniform(seed, choice, index):
    """Compute `reference.philox.uniform` with 64-bit words that hold 32 bits.

    It is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    seed, choice, index = seed.to(tl.uint64), choice.to(tl.uint64), index.to(tl.uint64)
    c0, c1, c2, c3 = index & _MASK32, index >> 32, choice & _MASK32, index & 0
    k0, k1 = seed & _MASK32, seed >> 32
    for _ in tl.static_range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return (((c0 << 32) | c1) >> 11).to(tl.float64) * (2.0**-53)


@triton.jit
def _chunk_stats_kernel(p_logits, p_temperature, p_least, p_greatest, p_sums, row_stride, vocab, CHUNK: tl.constexpr):
    """Store a chunk's least and greatest logit, and for rows with a temperature the sum of its weights relative to the
    greatest.

    The greatest is infinite if a logit of the chunk is not finite."""
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
def _find_threshold(
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
    CANDIDATES: tl.constexpr,
):
    """Find the highest threshold such that the logits at or above it reach `target`.

    On entry the `num_low` logits with keys from `low` on reach the target, and no logit has a key from `high` on.
    `target` is a number of logits, or with BY_WEIGHT a sum of weights. Returns (low, high, num_above, weight_above,
    num_at): the threshold is in `[low, high)`, where the keys of `num_at` logits lie, a single one or equal ones;
    `num_above` logits with a total weight of `weight_above` have keys from `high` on.
    """
    dtype: tl.constexpr = p_row.dtype.element_ty
    # Candidates are spaced evenly by value and evenly by key in alternate passes: the former converge fast because they
    # follow the distribution of logits, the latter guarantee termination.
    o_candidate = tl.arange(0, CANDIDATES) + 1
    b_fraction = o_candidate.to(tl.float64) / (CANDIDATES + 1)
    num_above = tl.full([], 0, tl.int32)
    weight_above = tl.full([], 0.0, tl.float64)
    i_pass = 0
    while (num_low - num_above > 1) & (low + 1 < high):
        least = _value(low, dtype)
        if i_pass % 2 == 0:
            b_candidate = _key_of(least * (1 - b_fraction) + _value(high - 1, dtype) * b_fraction, dtype)
        else:
            step = tl.maximum(high // CANDIDATES - low // CANDIDATES, 1)
            b_candidate = (low + step * o_candidate).to(low.dtype)
        # [CANDIDATES], ascending, each between the bounds
        b_candidate = tl.minimum(tl.maximum(b_candidate, low + 1), high - 1)
        b_counts = tl.zeros([CANDIDATES, CHUNK], dtype=tl.int32)
        b_weights = tl.zeros([CANDIDATES, CHUNK], dtype=tl.float64)
        for i_chunk in range(NUM_CHUNKS):
            if tl.load(p_greatest + i_chunk) >= least:
                o_id = i_chunk * CHUNK + tl.arange(0, CHUNK)
                m_id = o_id < vocab
                # [CHUNK]
                b_logit = tl.load(p_row + o_id, mask=m_id, other=0.0)
                b_key = _key(b_logit)
                is_reached = (b_key[None, :] >= b_candidate[:, None]) & (m_id & (b_key < high))[None, :]
                b_counts += is_reached.to(tl.int32)
                if BY_WEIGHT:
                    b_weight = tl.exp((widen(b_logit).to(tl.float64) - top) / temperature)
                    b_weights += tl.where(is_reached, b_weight[None, :], 0.0)
        # [CANDIDATES]. All sums have one shape and order over fewer and fewer terms, so rounding keeps them monotonic.
        b_count = num_above + tl.sum(b_counts, axis=1)
        b_weight_from = weight_above + tl.sum(b_weights, axis=1)
        reaches = b_weight_from >= target if BY_WEIGHT else b_count >= target
        low = tl.max(tl.where(reaches, b_candidate, low), axis=0)
        high = tl.min(tl.where(reaches, high, b_candidate), axis=0)
        num_low = tl.min(tl.where(reaches, b_count, num_low), axis=0)
        num_above = tl.max(tl.where(reaches, num_above, b_count), axis=0)
        weight_above = tl.max(tl.where(reaches, weight_above, b_weight_from), axis=0)
        i_pass += 1
    return low, high, num_above, weight_above, num_low - num_above


@triton.jit
def _kept_weights(p_row, o_id, m_id, top, temperature, low, high, num_ties, log_min_p, num_seen):
    """Return the weights of a chunk's tokens, 0 for filtered ones, and the number of its keys in `[low, high)`.

    A token is kept if its key is at least `high`, or if it is among the first `num_ties` tokens of the row with a key
    in `[low, high)`, `num_seen` of which are in earlier chunks; in both cases only if its log weight is at least
    `log_min_p`.
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
    """Return the total weight that `_kept_weights` keeps of each chunk, and the number of ties in earlier chunks.

    Both results are `[CHUNKS]`."""
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
            b_weight, found = _kept_weights(
                p_row, o_id, o_id < vocab, top, temperature, low, high, num_ties, log_min_p, num_seen
            )
            b_sums = tl.where(o_chunk == i_chunk, tl.sum(b_weight, axis=0), b_sums)
            num_seen += found
    return b_sums, b_seen


@triton.jit
def _sample_kernel(
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
    CANDIDATES: tl.constexpr,
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
            # Without a filter everything is kept: the range of ties `[low, low)` is empty.
            low = _key_of(tl.min(b_least, axis=0), dtype)
            end = _key_of(top, dtype) + 1
            high = low
            num_low = tl.full([], 0, tl.int32) + vocab
            num_ties = tl.full([], 0, tl.int32)
            has_top_k = (top_k > 0) & (top_k < vocab)
            if has_top_k:
                low, high, num_above, _weight, num_at = _find_threshold(
                    p_row, p_greatest, vocab, top, temperature, low, end, num_low, top_k,
                    False, CHUNK, NUM_CHUNKS, CANDIDATES,
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
                low, high, num_above, weight_above, num_at = _find_threshold(
                    p_row, p_greatest, vocab, top, temperature, low, end, num_low, target,
                    True, CHUNK, NUM_CHUNKS, CANDIDATES,
                )  # fmt: skip
                # Keep as many equal logits as the target needs, at least one and no more than top-k kept.
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
            # The first chunk in which the running sum exceeds the aim; if rounding prevents it, the last with weight.
            has_weight = b_sums > 0
            chunk = tl.min(tl.where(has_weight & (b_running > aim), o_chunk, CHUNKS), axis=0)
            chunk = tl.where(chunk < CHUNKS, chunk, tl.max(tl.where(has_weight, o_chunk, 0), axis=0))
            before = tl.sum(tl.where(o_chunk == chunk - 1, b_running, 0.0), axis=0)
            num_seen = tl.sum(tl.where(o_chunk == chunk, b_seen, 0), axis=0)
            o_id = chunk * CHUNK + o_lane
            b_weight, _found = _kept_weights(
                p_row, o_id, o_id < vocab, top, temperature, low, high, num_ties, log_min_p, num_seen
            )
            passes = (b_weight > 0) & (before + tl.cumsum(b_weight, axis=0) > aim)
            first = tl.min(tl.where(passes, o_id, vocab), axis=0)
            last = tl.max(tl.where(b_weight > 0, o_id, 0), axis=0)
            token = tl.where(first < vocab, first, last).to(tl.int64)
    tl.store(p_tokens + i_row, token)


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return one sampled token id for each row of `logits` `[R, V]`; -1 for a row with a number that is not finite. The
    exact result is defined in `tandem_kernels.contract`."""
    count, vocab = logits.shape
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if not count:
        return tokens
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_chunks = triton.cdiv(vocab, _CHUNK)
    least, greatest, sums = torch.empty((3, count, num_chunks), dtype=torch.float64, device=logits.device)
    _chunk_stats_kernel[(count, num_chunks)](
        logits,
        rows.temperature,
        least,
        greatest,
        sums,
        logits.stride(0),
        vocab,
        CHUNK=_CHUNK,
        num_warps=_STATS_WARPS,
        **UNFUSED,
    )
    _sample_kernel[(count,)](
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
        CANDIDATES=_CANDIDATES,
        num_warps=_SAMPLE_WARPS,
        **UNFUSED,
    )
    return tokens
