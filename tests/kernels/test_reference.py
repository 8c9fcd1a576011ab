"""Reference kernels that join others, and float8 planes, against their parts and formulas written another way."""

from __future__ import annotations

import pytest
import torch

from tandem.kv.layout import KVGroup, KVLayout
from tandem.runtime.kv_cache import KVCache
from tandem_kernels.contract import FLOAT8, HeadNorms, SamplingRows
from tandem_kernels.dispatch import REFERENCE, KernelsUnavailable, kernels_for
from tandem_kernels.reference import (
    add_rms_norm,
    cache_write,
    pack_blocks,
    paged_attention,
    rms_norm,
    rope,
    rope_cache_write,
    rope_tables,
    sample,
    silu_mul,
    unpack_blocks,
)
from tandem_kernels.reference.philox import uniform
from tests.kernels.batches import attention_batch

_HEADS, _GROUPS, _DIM, _BLOCK = 4, 2, 16, 8


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _cache(dtype: str, num_blocks: int = 6) -> KVCache:
    return KVCache(KVLayout(_BLOCK, (KVGroup(2, _GROUPS, _DIM, dtype),)), num_blocks)


def test_add_rms_norm_norms_the_sum() -> None:
    x, residual, weight = torch.randn((3, 8)), torch.randn((3, 8)), torch.randn(8)
    rows, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    assert torch.equal(rows, rms_norm(residual + x, weight, 1e-5))


def test_silu_mul_gates_the_second_half() -> None:
    gate, up = torch.randn((3, 5), dtype=torch.float64), torch.randn((3, 5), dtype=torch.float64)
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(silu_mul(torch.cat((gate, up), 1)), expected)


@pytest.mark.parametrize("has_norms", [False, True])
def test_rope_cache_write_is_its_parts(has_norms: bool) -> None:
    rows = torch.randn((3, _HEADS + 2 * _GROUPS, _DIM))
    query, key, value = rows[:, :_HEADS], rows[:, _HEADS:-_GROUPS], rows[:, -_GROUPS:]
    norms = HeadNorms(torch.randn(_DIM), torch.randn(_DIM), 1e-5) if has_norms else None
    cos, sin = rope_tables(torch.tensor([0, 5, 100]), torch.rand(_DIM // 2), 1.0, torch.float32)
    slots = torch.tensor([9, -1, 3])
    kv = _cache("float32").layers[1]
    found = rope_cache_write(rows.flatten(1), cos, sin, norms, kv, slots)
    if norms is not None:
        query, key = rms_norm(query, norms.query, 1e-5), rms_norm(key, norms.key, 1e-5)
    assert torch.equal(found, rope(query, cos, sin))
    for row, (block, offset) in {0: (1, 1), 2: (0, 3)}.items():
        assert torch.equal(kv.key[block, :, offset], rope(key, cos, sin)[row])
        assert torch.equal(kv.value[block, :, offset], value[row])
    assert int((kv.key.abs().sum((1, 3)) > 0).sum()) == 2, "the row without a slot is nowhere"


def test_blocks_are_packed_by_range_of_heads() -> None:
    pool = torch.randn((5, 4, 3, 2))
    packed = pack_blocks(pool, torch.tensor([4, 1]), 1, 3)
    assert packed.is_contiguous()
    assert torch.equal(packed, torch.stack((pool[4, 1:3], pool[1, 1:3])))
    other = torch.zeros((3, 4, 3, 2))
    unpack_blocks(packed, other, torch.tensor([0, 2]), 2)
    assert torch.equal(other[0, 2:], pool[4, 1:3])
    assert torch.equal(other[2, 2:], pool[1, 1:3])
    assert not other[:, :2].any()
    assert not other[1].any()


def _write(cache: KVCache, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of very different magnitudes in the first blocks of layer 1."""
    key, value = (
        torch.randn((num_tokens, _GROUPS, _DIM)) * 10.0 ** torch.arange(num_tokens)[:, None, None] for _ in "kv"
    )
    cache_write(key, value, cache.layers[1], torch.arange(num_tokens))
    return key, value


def test_float8_has_a_scale_for_each_token_and_head() -> None:
    cache = _cache("float8_e4m3fn")
    key, value = _write(cache, 11)
    kv = cache.layers[1]
    assert (kv.key.dtype, kv.key.shape) == (FLOAT8, (6, _GROUPS, _BLOCK, _DIM))
    for rows, plane, scales in ((key, kv.key, kv.key_scale), (value, kv.value, kv.value_scale)):
        assert scales is not None
        for token in range(11):
            block, offset = divmod(token, _BLOCK)
            scale = scales[block, :, offset]
            assert torch.equal(scale, rows[token].abs().amax(-1) / 448)
            # Three bits of mantissa: half a step is a sixteenth, where the number is not far below the row's greatest.
            error = (plane[block, :, offset].float() * scale[:, None] - rows[token]).abs()
            assert bool((error <= rows[token].abs() / 16 + scale[:, None] * 2.0**-10).all())
    assert not cache.pool[2:].any()
    assert not cache.pool[:, :, 0].any(), "the other layer's tiles are another's"


def test_float8_of_zeros_is_zero() -> None:
    kv = _cache("float8_e4m3fn").layers[0]
    zero = torch.zeros((1, _GROUPS, _DIM))
    cache_write(zero, zero, kv, torch.tensor([3]))
    assert kv.key_scale is not None
    assert bool((kv.key_scale[0, :, 3] == 1).all())
    assert not kv.key[0, :, 3].float().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_reads_float8_as_the_numbers_it_stands_for(dtype: torch.dtype) -> None:
    cache, plain = _cache("float8_e4m3fn"), _cache("float32")
    key, value = torch.randn((20, _GROUPS, _DIM)), torch.randn((20, _GROUPS, _DIM))
    cache_write(key, value, cache.layers[1], torch.arange(20))
    kv = cache.layers[1]
    assert kv.key_scale is not None
    assert kv.value_scale is not None
    same = plain.layers[1]
    same.key.copy_(kv.key.float() * kv.key_scale[..., None])
    same.value.copy_(kv.value.float() * kv.value_scale[..., None])
    batch = attention_batch([(1, 17), (3, 20)], [[0, 1, 2]] * 2, 1)
    query = torch.randn((4, _HEADS, _DIM)).to(dtype)
    out = paged_attention(query, kv, batch, 0.25)
    assert torch.equal(out, paged_attention(query.float(), same, batch, 0.25).to(dtype))


def test_a_place_that_nobody_has_yields_zeros() -> None:
    cache = _cache("float32")
    _write(cache, 12)
    batch = attention_batch([(1, 12), (1, 0), (1, 2)], [[0, 1], [5, 5], [0, 0]], 3)
    out = paged_attention(torch.randn((3, _HEADS, _DIM)), cache.layers[1], batch, 0.25)
    assert not out[1].any()
    assert out[0].any()
    assert out[2].any()


def _rows(**given: list[float]) -> SamplingRows:
    """Three rows that are drawn plainly, but for what is given."""
    plain: dict[str, list[float]] = {
        "temperature": [1, 1, 1], "top_k": [0, 0, 0], "top_p": [1, 1, 1], "log_min_p": [-torch.inf] * 3,
        "seed": [1, 2, 3], "choice": [0, 0, 0], "index": [0, 0, 0],
    }  # fmt: skip
    whole = ("top_k", "seed", "choice", "index")
    fields = {
        name: torch.tensor(values, dtype=torch.int64 if name in whole else torch.float64)
        for name, values in (plain | given).items()
    }
    return SamplingRows(**fields)


def test_sample_treats_each_row_by_its_own() -> None:
    logits = torch.tensor([[0.0, 3, 3, 1], [0, 0, 0, 9], [1, torch.nan, 0, 0]])
    assert sample(logits, _rows(temperature=[0, 0, 0])).tolist() == [1, 3, -1]
    assert sample(logits, _rows(top_k=[1, 1, 1])).tolist() == [1, 3, -1]


@pytest.mark.parametrize("seed", [7, (1 << 63) + 5])
def test_sample_inverts_the_distribution_at_its_number(seed: int) -> None:
    logits = torch.tensor([[0.0, 1, 2, 3]]).expand(3, -1)
    bits = seed - (1 << 64) if seed >> 63 else seed
    sampled = sample(logits, _rows(seed=[bits] * 3, choice=[0, 1, 1], index=[4, 4, 5]))
    shares = torch.softmax(logits[0].double(), 0).cumsum(0)
    numbers = [uniform(seed, *place) for place in ((0, 4), (1, 4), (1, 5))]
    assert sampled.tolist() == [int((shares <= number).sum()) for number in numbers]
    assert len(set(numbers)) == 3


def test_the_cpu_has_the_reference_and_no_other_device_falls_back_to_it() -> None:
    assert kernels_for(torch.device("cpu")) is REFERENCE
    with pytest.raises(KernelsUnavailable, match="meta"):
        kernels_for(torch.device("meta"))
