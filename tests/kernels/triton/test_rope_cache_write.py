"""Heads that are normed, turned and written into paged KV in Triton, against the plain kernel on whole pools."""

from __future__ import annotations

import itertools

import pytest
import torch

from tandem_kernels import reference
from tandem_kernels.contract import FLOAT8, HeadNorms
from tandem_kernels.triton import KERNELS
from tests.kernels.triton.tensors import DTYPES, assert_rounded, layer_of, on, pool_of, randn

_LAYERS, _LAYER, _BLOCKS = 3, 1, 5


def _slots(rows: int, block_size: int) -> torch.Tensor:
    """Different slots that hit both sides of a block's end, some of them nobody's."""
    edges = [block_size - 1, block_size, 0, -1, 3 * block_size, 2 * block_size + 1, -7, 5 * block_size - 1]
    return torch.tensor(edges[:rows], dtype=torch.int64)


def _tables(rows: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    inv_freq = 1.0 / 10_000 ** (torch.arange(0, dim, 2) / dim)
    return reference.rope_tables(torch.arange(rows) * 37, inv_freq, 1.0, dtype)


# rows, query heads, KV heads, head size, block size, type of rows, type of planes, norms
_SOME = [
    (0, 4, 4, 64, 16, "bf16", "bf16", True),
    (1, 8, 1, 64, 16, "bf16", "bf16", False),
    (8, 3, 1, 80, 16, "f32", "f32", False),
    (8, 8, 2, 96, 32, "f16", "f16", True),
    (5, 16, 2, 128, 64, "bf16", "bf16", True),
    (8, 4, 4, 256, 16, "bf16", "f8", False),
    (8, 6, 2, 128, 16, "f32", "f8", True),
    (3, 4, 1, 64, 128, "f32", "f32", True),
    (8, 3, 3, 80, 32, "f16", "f8", False),
    (2, 4, 2, 96, 16, "f64", "f64", True),
]
_ALL = itertools.chain.from_iterable(
    itertools.product((8,), (h,), (g,), (64, 80, 96, 128, 256), (16, 128), (t,), (t, "f8"), (False, True))
    for (h, g), t in itertools.product(((3, 3), (3, 1), (8, 2), (16, 2)), ("f32", "bf16", "f16"))
)
_GRID = [*_SOME, *(pytest.param(*case, marks=pytest.mark.nightly) for case in _ALL if case not in _SOME)]


@pytest.mark.parametrize(("rows", "heads", "groups", "dim", "block_size", "name", "plane", "is_normed"), _GRID)
def test_equals_the_plain_kernel(
    rows: int,
    heads: int,
    groups: int,
    dim: int,
    block_size: int,
    name: str,
    plane: str,
    is_normed: bool,
    device: torch.device,
) -> None:
    dtype = DTYPES[name]
    pool = pool_of((_BLOCKS, groups, _LAYERS, block_size, dim), FLOAT8 if plane == "f8" else dtype)
    qkv, slots = randn(rows, (heads + 2 * groups) * dim, dtype=dtype), _slots(rows, block_size)
    cos, sin = _tables(rows, dim, dtype)
    norms = HeadNorms(randn(dim, dtype=dtype, seed=8), randn(dim, dtype=dtype, seed=9), 1e-6) if is_normed else None

    expected_pool = pool.clone()
    kv = layer_of(expected_pool, _LAYER, block_size, dim)
    expected = reference.rope_cache_write(qkv, cos, sin, norms, kv, slots)
    got_pool = pool.to(device)
    kv = layer_of(got_pool, _LAYER, block_size, dim)
    moved = None if norms is None else on(device, norms)
    got = KERNELS.rope_cache_write(qkv.to(device), cos.to(device), sin.to(device), moved, kv, slots.to(device)).cpu()
    got_pool = got_pool.cpu()

    assert got.dtype == dtype
    if not is_normed:
        assert torch.equal(got, expected)
        assert torch.equal(got_pool.view(torch.uint8), expected_pool.view(torch.uint8)), "bit by bit, all of the pool"
        return
    # The sum inside a norm may be taken in another order, which moves a number by a step; turning mixes two of them.
    largest = expected.double().abs().amax(-1, keepdim=True).expand(expected.shape)
    assert_rounded(got, expected.double(), 4.0 * _step(dtype) / torch.finfo(dtype).eps, largest)
    _assert_same_cache(got_pool, expected_pool, slots, block_size, dim)


def _step(dtype: torch.dtype) -> float:
    """Norms are computed in float32 at most."""
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def _assert_same_cache(
    got: torch.Tensor, expected: torch.Tensor, slots: torch.Tensor, block_size: int, dim: int
) -> None:
    written = torch.zeros(_BLOCKS, block_size, dtype=torch.bool)
    written.view(-1)[slots[slots >= 0]] = True
    for layer in range(_LAYERS):
        ours, theirs = layer_of(got, layer, block_size, dim), layer_of(expected, layer, block_size, dim)
        for plane in ("key", "value"):
            a, b = getattr(ours, plane), getattr(theirs, plane)
            scale = getattr(theirs, f"{plane}_scale")
            if layer == _LAYER and plane == "key":
                untouched = ~written[:, None].expand(a.shape[:3])
                assert torch.equal(a[untouched].view(torch.uint8), b[untouched].view(torch.uint8))
                # Next to a tie a float8 may fall to its other neighbour: a whole step of 2**-3.
                wide, step = b.float(), 0.126 if scale is not None else 4 * _step(a.dtype)
                torch.testing.assert_close(a.float(), wide, rtol=step, atol=step * 8)
                if scale is not None:
                    torch.testing.assert_close(ours.key_scale, scale, rtol=2e-2, atol=0)
            else:
                assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
                if scale is not None:
                    assert torch.equal(getattr(ours, f"{plane}_scale"), scale)


@pytest.mark.parametrize("largest", [0.0, 1e-44, 1e-38, 5.3e-36, 1.0, 3e38])
def test_float8_of_any_size(largest: float, device: torch.device) -> None:
    """Zeros and what has no normal scale take the scale 1; ties go to even."""
    dim, block_size = 64, 16
    pool = pool_of((2, 1, 1, block_size, dim), FLOAT8)
    row = torch.linspace(-1, 1, dim).mul(largest)
    row[::3] = 0
    qkv = row.repeat(1, 3)
    cos, sin = torch.ones(1, dim), torch.zeros(1, dim)
    slots = torch.tensor([17])
    expected = pool.clone()
    reference.rope_cache_write(qkv, cos, sin, None, layer_of(expected, 0, block_size, dim), slots)
    got = pool.to(device)
    kv = layer_of(got, 0, block_size, dim)
    KERNELS.rope_cache_write(qkv.to(device), cos.to(device), sin.to(device), None, kv, slots.to(device))
    ours, theirs = (layer_of(p, 0, block_size, dim) for p in (got.cpu(), expected))
    assert torch.equal(ours.value_scale, theirs.value_scale)
    assert torch.equal(ours.key.float(), theirs.key.float())
    assert torch.equal(ours.value.float(), theirs.value.float())


def test_rows_may_be_part_of_wider_ones(device: torch.device) -> None:
    """As they are where a projection yields more than the attention of one rank."""
    dim, wide = 64, randn(3, 500)
    pool, slots = torch.zeros(2, 1, 1, 2, 16, dim), torch.tensor([1, 2, 3])
    cos, sin = _tables(3, dim, torch.float32)
    qkv = wide.to(device)[:, 64 : 64 + 4 * dim]
    kv = layer_of(pool.to(device), 0, 16, dim)
    got = KERNELS.rope_cache_write(qkv, cos.to(device), sin.to(device), None, kv, slots.to(device))
    expected = reference.rope_cache_write(
        wide[:, 64 : 64 + 4 * dim].contiguous(), cos, sin, None, layer_of(pool, 0, 16, dim), slots
    )
    assert torch.equal(got.cpu(), expected)


def test_heads_that_are_too_wide_are_refused(device: torch.device) -> None:
    pool = torch.zeros(1, 1, 1, 2, 16, 512, device=device)
    rows, slots = torch.zeros(1, 3 * 512, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="512 numbers"):
        KERNELS.rope_cache_write(rows, rows[:, :512], rows[:, :512], None, layer_of(pool, 0, 16, 512), slots)
