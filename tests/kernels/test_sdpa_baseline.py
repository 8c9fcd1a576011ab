"""Torch's attention of whole prompts against the reference over ragged batches."""

from __future__ import annotations

import pytest
import torch

from tandem_kernels.bench.sdpa_baseline import prompt_attention
from tandem_kernels.reference import paged_attention
from tests.kernels.triton.attention_cases import SCALE, Case, problem_of


@pytest.mark.parametrize("lens", [(1,), (50,), (15, 16, 17), (1, 40, 2, 33, 1)], ids=str)
@pytest.mark.parametrize(("heads", "group"), [(2, 1), (1, 8), (2, 3)])
def test_it_equals_the_reference(lens: tuple[int, ...], heads: int, group: int) -> None:
    case = Case(tuple((n, n) for n in lens), 0, heads, group, head_dim=32)
    problem = problem_of(case, torch.device("cpu"), extra_width=1)
    out = prompt_attention(problem.query, problem.kv, problem.batch, SCALE)
    expected = paged_attention(problem.query, problem.kv, problem.batch, SCALE)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_float8_is_refused() -> None:
    problem = problem_of(Case(((4, 4),), 0, float8=True), torch.device("cpu"))
    with pytest.raises(ValueError, match="float8"):
        prompt_attention(problem.query, problem.kv, problem.batch, SCALE)
