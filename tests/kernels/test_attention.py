"""Reference attention and cache write against naive dense attention in float64 over ragged grids."""

from __future__ import annotations

import random

import pytest
import torch

from tandem_kernels.contract import AttentionBatch, LayerKV
from tandem_kernels.reference import cache_write, paged_attention
from tests.kernels.batches import attention_batch

_DIM = 16
_LAYERS = 2


def _layer(pool: torch.Tensor) -> LayerKV:
    return LayerKV(pool[:, :, 1, 0], pool[:, :, 1, 1])


def _dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Rows `[T, H, D]` at the end of `keys`, `values` `[C, G, D]`, one at a time, in float64."""
    rows, heads, _ = query.shape
    context, groups, _ = keys.shape
    out = torch.empty_like(query, dtype=torch.float64)
    for row in range(rows):
        seen = context - rows + row + 1
        for head in range(heads):
            group = head // (heads // groups)
            scores = keys[:seen, group].double() @ query[row, head].double() * scale
            out[row, head] = torch.softmax(scores, 0) @ values[:seen, group].double()
    return out


def _case(
    spans: list[tuple[int, int]], heads: int, groups: int, block_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch, list[torch.Tensor], list[torch.Tensor]]:
    """A pool and a batch with one sequence per `(rows, context)`, whose KV lies in shuffled blocks of layer 1."""
    torch.manual_seed(3)
    needed = [-(-context // block_size) for _, context in spans]
    free = list(range(sum(needed) + 2))
    random.Random(5).shuffle(free)
    pool = torch.randn((len(free), groups, _LAYERS, 2, block_size, _DIM)).to(dtype)
    tables, keys, values = [], [], []
    for (_, context), count in zip(spans, needed, strict=True):
        blocks, free = free[:count], free[count:]
        key, value = (torch.randn((context, groups, _DIM)).to(dtype) for _ in range(2))
        positions = torch.arange(context)
        slots = torch.tensor(blocks)[positions // block_size] * block_size + positions % block_size
        cache_write(key, value, _layer(pool), slots)
        tables.append(blocks + blocks[:1] * (max(needed) - count))
        keys.append(key)
        values.append(value)
    query = torch.randn((sum(rows for rows, _ in spans), heads, _DIM)).to(dtype)
    return pool, query, attention_batch(spans, tables), keys, values


# One token, block boundary -1/0/+1, whole prompts, chunks after a prefix, decodes of very different lengths.
_SPANS = {
    "one token": [(1, 1)],
    "decodes": [(1, 1), (1, 15), (1, 16), (1, 17), (1, 100), (1, 33)],
    "prompts": [(2, 2), (15, 15), (16, 16), (17, 17), (50, 50)],
    "chunks": [(3, 18), (16, 32), (16, 33), (2, 90)],
    "mixed": [(1, 40), (20, 20), (1, 2), (7, 47), (1, 16)],
}


def _check_dense(
    spans: list[tuple[int, int]], heads: int, groups: int, block_size: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Assert that attention over the case is dense attention over each of its sequences."""
    pool, query, batch, keys, values = _case(spans, heads, groups, block_size, dtype)
    out = paged_attention(query, _layer(pool), batch, 0.3)
    assert out.dtype == dtype
    starts = batch.query_starts.tolist()
    for i in range(len(spans)):
        rows = slice(starts[i], starts[i + 1])
        expected = _dense(query[rows], keys[i], values[i], 0.3)
        torch.testing.assert_close(out[rows].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("spans", _SPANS.values(), ids=_SPANS.keys())
@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (8, 1), (9, 3)])
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_attention_equals_dense(spans: list[tuple[int, int]], heads: int, groups: int, block_size: int) -> None:
    _check_dense(spans, heads, groups, block_size, torch.float32, 1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    _check_dense(_SPANS["mixed"], 4, 2, 8, dtype, tolerance)


def test_no_sequences() -> None:
    pool = torch.zeros((2, 1, 1, 2, 4, _DIM))
    planes = LayerKV(pool[:, :, 0, 0], pool[:, :, 0, 1])
    out = paged_attention(torch.zeros((0, 2, _DIM)), planes, attention_batch([], []), 1.0)
    assert out.shape == (0, 2, _DIM)


def test_what_lies_beyond_the_context_does_not_matter() -> None:
    spans = [(1, 5), (3, 9), (1, 20)]
    pool, query, batch, _, _ = _case(spans, 4, 2, 8, torch.float32)
    before = paged_attention(query, _layer(pool), batch, 0.3)
    for (_, context), table in zip(spans, batch.block_tables.tolist(), strict=True):
        pool[table[(context - 1) // 8], :, 1, :, context % 8 or 8 :] = 1e6
    after = paged_attention(query, _layer(pool), batch, 0.3)
    assert torch.equal(before, after)


def test_cache_write_touches_its_slots_and_no_other() -> None:
    pool = torch.zeros((4, 2, _LAYERS, 2, 8, _DIM))
    slots = torch.tensor([0, 7, 8, 31])
    key, value = torch.randn((4, 2, _DIM)), torch.randn((4, 2, _DIM))
    cache_write(key, value, _layer(pool), slots)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(pool[slot // 8, :, 1, 0, slot % 8], key[i])
        assert torch.equal(pool[slot // 8, :, 1, 1, slot % 8], value[i])
    assert int((pool != 0).sum()) == key.numel() + value.numel()


def test_a_plane_of_another_layout_is_refused() -> None:
    pool = torch.zeros((4, 8, 2, _DIM))
    planes = LayerKV(*(pool.transpose(1, 2),) * 2)
    with pytest.raises(ValueError, match="not a plane"):
        paged_attention(torch.zeros((1, 2, _DIM)), planes, attention_batch([(1, 1)], [[0]], 1), 1.0)
