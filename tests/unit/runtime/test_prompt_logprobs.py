"""Test that prompt log probabilities do not depend on the chunk size; ties go to the lower id."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.runtime import prompt_logprobs
from tandem.runtime.prompt_logprobs import best_of_rows, compute_prompt_logprobs
from tandem_kernels.reference.sample import best

_VOCAB = 30


def _hidden(num_rows: int) -> torch.Tensor:
    return torch.randn((num_rows, 4), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _head(hidden: torch.Tensor) -> torch.Tensor:
    weights = torch.randn((4, _VOCAB), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return hidden @ weights


@pytest.mark.parametrize("num_rows_at_once", [1, 2, 7, 100])
@pytest.mark.parametrize("num_top", [0, 1, 5, 50])
def test_scores_are_log_softmax(num_rows_at_once: int, num_top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "PIECE_BYTES", num_rows_at_once * _VOCAB * 8 + 7)
    sizes: list[int] = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return _head(hidden)

    hidden, tokens = _hidden(15), [(7 * i) % _VOCAB for i in range(15)]
    scores = compute_prompt_logprobs(head, hidden, tokens, num_top, _VOCAB)
    logprobs = torch.log_softmax(_head(hidden), 1)
    assert sum(sizes) == 15 and max(sizes) <= num_rows_at_once
    for row, token, scored in zip(logprobs, tokens, scores, strict=True):
        assert scored.id == token and scored.logprob == pytest.approx(float(row[token]), abs=1e-12)
        assert [i for i, _ in scored.top] == best(row, num_top).tolist()
        assert [value for _, value in scored.top] == pytest.approx([float(row[i]) for i, _ in scored.top], abs=1e-12)


@pytest.mark.parametrize("count", range(8))
def test_of_equal_values_the_lower_ids_are_best(count: int) -> None:
    rows = torch.randint(0, 3, (200, 6), generator=torch.Generator().manual_seed(3)).double()
    assert best_of_rows(rows, count).tolist() == [best(row, count).tolist() for row in rows]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_rows_are_refused(bad: float) -> None:
    hidden = _hidden(3)

    def head(rows: torch.Tensor) -> torch.Tensor:
        logits = _head(rows)
        logits[-1, 4] = bad
        return logits

    with pytest.raises(ValueError, match="not finite"):
        compute_prompt_logprobs(head, hidden, (1, 2, 3), 2, _VOCAB)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_any_float_type(dtype: torch.dtype) -> None:
    logits = _head(_hidden(2)).to(dtype)
    (one, other) = compute_prompt_logprobs(lambda hidden: logits, _hidden(2), (3, 4), 2, _VOCAB)
    expected = torch.log_softmax(logits.double(), 1)
    assert (one.logprob, other.logprob) == pytest.approx((float(expected[0, 3]), float(expected[1, 4])), abs=1e-12)
