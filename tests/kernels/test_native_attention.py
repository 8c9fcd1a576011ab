"""Compiled attention equals dense attention in float64, and a row's bits depend on its own context alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from tandem_kernels import reference
from tandem_kernels.contract import AttentionBatch, LayerKV
from tandem_kernels.native import library
from tests.covering import covering
from tests.kernels.batches import attention_batch

_LAYERS, _LAYER = 2, 1
_Span = tuple[int, int]  # rows, context
_KV = list[tuple[torch.Tensor, torch.Tensor]]  # of each sequence: keys and values [context, G, D]

# Edges of tiles (64 slots), segments (256) and blocks, whole prompts, chunks, drafts, decodes.
_SPANS: dict[str, list[_Span]] = {
    "one token": [(1, 1)],
    "decodes": [(1, 1), (1, 15), (1, 16), (1, 17), (1, 63), (1, 64), (1, 65), (1, 255), (1, 256), (1, 257), (1, 700)],
    "prompts": [(2, 2), (15, 15), (17, 17), (64, 64), (65, 65), (130, 130)],
    "chunks": [(3, 18), (16, 33), (2, 65), (100, 300), (64, 520)],
    "drafts": [(4, 300), (8, 258), (2, 513), (9, 700)],
    "mixed": [(1, 40), (20, 20), (1, 900), (7, 267), (1, 2), (70, 270)],
}
_SHAPES = [(1, 1, 8), (3, 3, 16), (9, 3, 64), (8, 1, 128), (14, 2, 40), (16, 2, 256)]  # H, G, D
_ALL = list(itertools.product(_SPANS, _SHAPES, (1, 16, 128)))
_SOME = covering(_ALL)
_GRID = [*_SOME, *(pytest.param(*case, marks=pytest.mark.nightly) for case in _ALL if case not in _SOME)]


@dataclass(frozen=True)
class _Case:
    query: torch.Tensor
    pool: torch.Tensor
    batch: AttentionBatch
    kv: _KV

    def attend(self, lanes: int = 2) -> torch.Tensor:
        scale = self.query.shape[2] ** -0.5
        return library.paged_attention(_team(lanes), self.query, self.pool, _LAYER, self.batch, scale)

    def exact(self) -> torch.Tensor:
        pool = self.pool.double()
        planes = pool[:, :, _LAYER, 0], pool[:, :, _LAYER, 1]
        return reference.paged_attention(self.query.double(), LayerKV(*planes), self.batch, self.query.shape[2] ** -0.5)


_team = cache(library.Team)


def _random_kv(spans: list[_Span], groups: int, dim: int, seed: int) -> _KV:
    rng = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn((c, groups, dim), generator=rng) for _ in range(2)) for _, c in spans]


def _lay_out(spans: list[_Span], query: torch.Tensor, kv: _KV, block_size: int, fill: float = 0.0) -> _Case:
    """The sequences in shuffled blocks of a pool whose other slots all hold `fill`."""
    needed = [-(-context // block_size) for _, context in spans]
    free = list(range(sum(needed) + 2))
    random.Random(block_size).shuffle(free)
    _, groups, dim = kv[0][0].shape
    pool = torch.full((len(free), groups, _LAYERS, 2, block_size, dim), fill)
    tables = []
    for (_, context), count, planes in zip(spans, needed, kv, strict=True):
        blocks, free = free[:count], free[count:]
        positions = torch.arange(context)
        for plane in range(2):
            pool[torch.tensor(blocks)[positions // block_size], :, _LAYER, plane, positions % block_size] = planes[
                plane
            ]
        tables.append(blocks + blocks[:1] * (max(needed) - count))
    return _Case(query, pool, attention_batch(spans, tables), kv)


def _case(spans: list[_Span], shape: tuple[int, int, int], block_size: int, seed: int = 3) -> _Case:
    heads, groups, dim = shape
    rng = torch.Generator().manual_seed(seed + 1)
    query = torch.randn((sum(rows for rows, _ in spans), heads, dim), generator=rng)
    return _lay_out(spans, query, _random_kv(spans, groups, dim, seed), block_size)


def _assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equality that tells -0 from 0."""
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize(("spans", "shape", "block_size"), _GRID)
def test_it_is_dense_attention(spans: str, shape: tuple[int, int, int], block_size: int) -> None:
    case = _case(_SPANS[spans], shape, block_size)
    torch.testing.assert_close(case.attend().double(), case.exact(), atol=2e-6, rtol=2e-6)


def test_scores_may_be_large() -> None:
    """Scores of +-80 and more, so that old sums vanish and new ones vanish: the score's own rounding shows, no more."""
    case = _case([(1, 700), (300, 300), (5, 513)], (6, 2, 64), 16)
    case = _Case(case.query * 40, case.pool, case.batch, case.kv)
    keys = torch.cat([key.flatten() for key, _ in case.kv])
    assert (case.query.abs().max() * keys.abs().max()) > 80
    torch.testing.assert_close(case.attend().double(), case.exact(), atol=3e-4, rtol=3e-4)


def test_equal_scores_average() -> None:
    """A query of zeros: weights are all the same, whatever part of the context comes first."""
    case = _case([(1, 1000), (3, 777)], (2, 1, 32), 8)
    case = _Case(torch.zeros_like(case.query), case.pool, case.batch, case.kv)
    expected = case.kv[0][1].double().mean(0)
    torch.testing.assert_close(case.attend()[0].double(), expected.expand(2, -1), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("spans", _SPANS.values(), ids=_SPANS.keys())
@pytest.mark.parametrize("shape", [(9, 3, 64), (14, 2, 40)])
def test_lanes_do_not_show(spans: list[_Span], shape: tuple[int, int, int]) -> None:
    case = _case(spans, shape, 16)
    alone = case.attend(1)
    for lanes in (2, 3, 7):
        _assert_same_bits(case.attend(lanes), alone)


@pytest.mark.parametrize("shape", [(9, 3, 64), (14, 2, 40)])
def test_neither_block_size_nor_what_lies_beyond_shows(shape: tuple[int, int, int]) -> None:
    case = _case(_SPANS["mixed"] + _SPANS["drafts"], shape, 16)
    expected = case.attend()
    for block_size, fill in ((1, 1e30), (8, -1e30), (32, 3e38), (64, -3e38), (256, 7.0)):
        other = _lay_out(_SPANS["mixed"] + _SPANS["drafts"], case.query, case.kv, block_size, fill)
        _assert_same_bits(other.attend(), expected)


@pytest.mark.parametrize("seed", range(12))
def test_company_and_chunks_do_not_show(seed: int) -> None:
    """A prompt computed whole, in random chunks beside other sequences, and row by row: the same bits."""
    rng = random.Random(seed)
    heads, groups, dim = shape = rng.choice(_SHAPES)
    length = rng.choice([1, 63, 65, 257, rng.randint(2, 600)])
    whole = _case([(length, length)], shape, 16, seed)
    expected = whole.attend()
    done = 0
    while done < length:
        count = rng.choice([1, 1, 2, 5, 17, rng.randint(1, length)])
        count = min(count, length - done)
        context = done + count
        others = [(rng.choice([1, 3, 20]), rng.choice([20, 64, 300, 513])) for _ in range(rng.choice([0, 1, 6]))]
        at = rng.randint(0, len(others))
        spans = [*others[:at], (count, context), *others[at:]]
        kv = _random_kv(spans, groups, dim, seed + done)
        kv[at] = tuple(plane[:context] for plane in whole.kv[0])
        before = sum(rows for rows, _ in spans[:at])
        query = torch.randn((sum(rows for rows, _ in spans), heads, dim))
        query[before : before + count] = whole.query[done:context]
        out = _lay_out(spans, query, kv, rng.choice([1, 8, 16, 64, 256])).attend(rng.choice([1, 2, 3]))
        _assert_same_bits(out[before : before + count], expected[done:context])
        done = context


def test_the_future_does_not_show() -> None:
    """A token's key and value change its own row alone, however large they are."""
    spans = [(5, 5), (6, 262), (40, 300)]
    case = _case(spans, (6, 2, 24), 16)
    before = case.attend()
    last = torch.tensor([4, 10, 50])
    kv = [tuple(torch.cat([plane[:-1], torch.full_like(plane[-1:], 1e37)]) for plane in planes) for planes in case.kv]
    after = _lay_out(spans, case.query, kv, 16).attend()
    rest = torch.ones(51, dtype=torch.bool).index_fill_(0, last, False)
    _assert_same_bits(after[rest], before[rest])
    assert not torch.isclose(after[last], before[last]).any()


def test_the_sign_of_a_zero_does_not_show() -> None:
    """A sum that underflows to -0 reads the same beside a row that sees one token more."""
    keys, values = torch.zeros((4, 1, 8)), torch.full((4, 1, 8), -0.0)
    keys[1], values[0], values[3] = 1.0, -1e-45, 1.0
    query = torch.ones((2, 1, 8))
    together = _lay_out([(2, 4)], query, [(keys, values)], 8).attend()[:1]
    assert not together.any()
    _assert_same_bits(_lay_out([(1, 3)], query[:1], [(keys[:3], values[:3])], 8).attend(), together)


def test_no_sequences() -> None:
    pool = torch.zeros((2, 1, 1, 2, 4, 16))
    out = library.paged_attention(_team(2), torch.zeros((0, 2, 16)), pool, 0, attention_batch([], []), 1.0)
    assert out.shape == (0, 2, 16)
