"""Attention whose rows all take one kernel: right, and a row has the same bits in whatever chunk and company."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tandem_kernels.triton.attention import paged_attention, row_attention
from tests.kernels.batches import attention_batch
from tests.kernels.triton.attention_cases import SCALE, Case, Problem, assert_close, problem_of
from tests.kernels.triton.test_attention import shorten_slices

_SPANS = (((1, 1), (1, 300), (1, 0), (17, 40), (70, 70), (1, 33), (5, 258)), 3)
_KINDS = [
    (torch.bfloat16, False, 128, 32),
    (torch.bfloat16, True, 64, 16),
    (torch.float16, False, 80, 64),
    (torch.float32, False, 64, 16),
    (torch.float32, True, 256, 128),
]
_ROWS = 40
"""Two tiles and a half."""


def _run(problem: Problem) -> torch.Tensor:
    return row_attention(problem.query, problem.kv, problem.batch, SCALE)


def _usual(problem: Problem) -> torch.Tensor:
    return paged_attention(problem.query, problem.kv, problem.batch, SCALE)


def _case(
    kind: tuple[torch.dtype, bool, int, int], spans: tuple[tuple[int, int], ...], num_decodes: int, heads: int = 2
) -> Case:
    dtype, float8, dim, block = kind
    return Case(spans, num_decodes, heads, 4, dim, block, dtype, float8)


@pytest.mark.parametrize("kind", _KINDS, ids=str)
def test_it_is_attention(kind: tuple[torch.dtype, bool, int, int], device: torch.device) -> None:
    problem = problem_of(_case(kind, *_SPANS), device)
    assert_close(_run(problem), problem)


@pytest.mark.parametrize(
    "kind",
    [_KINDS[1], _KINDS[3], *(pytest.param(_KINDS[i], marks=pytest.mark.nightly) for i in (0, 2))],
    ids=str,
)
def test_a_row_has_the_same_bits_in_any_chunk_and_company(
    kind: tuple[torch.dtype, bool, int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rows of a context at once, in pieces, and as decodes; alone and beside another sequence."""
    # Parts of so few tokens that the usual way splits these contexts.
    shorten_slices(monkeypatch, 32, 32)
    whole = problem_of(_case(kind, ((_ROWS, 200), (1, 120)), 0, heads=1), device)
    rows = _run(whole)[:_ROWS]
    for sizes in ((40,), (1, 7, 32), (16, 24), (1, 1, 37, 1)):
        assert sum(sizes) == _ROWS
        for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True):
            for with_other in (False, True):
                part = _part(whole, stop - size, stop, with_other=with_other)
                assert torch.equal(_run(part)[-size:], rows[stop - size : stop])
    last = _part(whole, _ROWS - 1, _ROWS, with_other=False)
    assert not torch.equal(_usual(last), _usual(whole)[_ROWS - 1 : _ROWS]), "nothing was shown: so does the usual way"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_a_row_does_not_see_leaves_no_trace(dtype: torch.dtype, device: torch.device) -> None:
    """From its middle row on, the chunk sees values that are millions of times as large as all before."""
    context, first_large = 200, 200 - _ROWS // 2
    whole = problem_of(_case((dtype, False, 64, 16), ((_ROWS, context),), 0, heads=1), device)
    for place, block in enumerate(whole.batch.block_tables[0].tolist()):
        tokens = 16 * place + torch.arange(16, device=device)
        factors = torch.where(tokens < first_large, 1e-3, torch.where(tokens < context, 5e3, 1.0))
        whole.kv.value[block] *= factors[:, None].to(dtype)
    rows = _run(whole)
    # Of each tile of 16 rows the first and the last; those around the first row that sees large values; some more.
    for place in sorted({0, 15, 16, 31, 32, 39, 18, 19, 20, 21, *range(0, _ROWS, 6)}):
        assert torch.equal(_run(_part(whole, place, place + 1, with_other=False)), rows[place : place + 1])
    largest = rows.abs().amax((1, 2))
    assert float(largest[: _ROWS // 2].max()) < 1e-2 and float(largest[_ROWS // 2 :].min()) > 1e-2


def _part(whole: Problem, start: int, stop: int, *, with_other: bool) -> Problem:
    """Rows [start, stop) of the first sequence, behind a decode of the second or alone."""
    size, contexts = stop - start, whole.batch.context_lens.tolist()
    spans, query, order = [(size, contexts[0] - (_ROWS - stop))], whole.query[start:stop], [0]
    if with_other:
        spans, query, order = [(1, contexts[1]), *spans], torch.cat((whole.query[_ROWS:], query)), [1, 0]
    num_decodes = len(order) if size == 1 else len(order) - 1
    part = attention_batch(spans, whole.batch.block_tables[order].contiguous(), num_decodes, query.device)
    return replace(whole, query=query, batch=part)


def test_no_rows(device: torch.device) -> None:
    assert _run(problem_of(Case((), 0), device)).shape == (0, 8, 64)
    assert not _run(problem_of(Case(((1, 0), (1, 0)), 1), device)).any()
