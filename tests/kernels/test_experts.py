"""Test the choice of experts and their mixture against plain Python, row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from tandem_kernels.contract import ExpertRouting
from tandem_kernels.dispatch import REFERENCE

_ROUTINGS = {
    "softmax": ExpertRouting(3),
    "normalised": ExpertRouting(3, is_normalised=True),
    "softmax of chosen": ExpertRouting(2, scores="softmax of chosen"),
    "sigmoid": ExpertRouting(2, scores="sigmoid", is_normalised=True, scaling=2.5),
    "groups": ExpertRouting(3, scores="sigmoid", is_normalised=True, num_groups=4, num_chosen_groups=2),
}


def _plain(logits: Sequence[float], bias: Sequence[float] | None, routing: ExpertRouting) -> dict[int, float]:
    """Weights by expert, as `contract.route` defines them."""
    experts = range(len(logits))
    powers = [math.exp(logit) for logit in logits]
    scores = [power / sum(powers) for power in powers]
    if routing.scores == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    ranked = [score + (bias[i] if bias else 0.0) for i, score in enumerate(scores)]
    size = len(logits) // routing.num_groups
    sums = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(routing.num_groups)]
    groups = sorted(range(routing.num_groups), key=lambda g: -sums[g])[: routing.num_chosen_groups]
    allowed = [expert for expert in experts if expert // size in groups]
    chosen = sorted(allowed, key=lambda expert: -ranked[expert])[: routing.num_chosen]
    total = sum(scores[expert] for expert in chosen)
    is_shared_out = routing.is_normalised or routing.scores == "softmax of chosen"
    return {e: scores[e] / (total if is_shared_out else 1.0) * routing.scaling for e in sorted(chosen)}


@pytest.mark.parametrize("name", _ROUTINGS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_choice_and_weights(name: str, has_bias: bool) -> None:
    routing, source = _ROUTINGS[name], torch.Generator().manual_seed(3)
    if has_bias and routing.scores == "softmax of chosen":
        pytest.skip("no bias there")
    logits = torch.randn(40, 8, generator=source, dtype=torch.float64)
    bias = torch.randn(8, generator=source) if has_bias else None
    experts, weights = REFERENCE.route(logits, bias, routing)
    assert experts.dtype == torch.int64 and weights.dtype == torch.float64
    for row, ids, values in zip(logits.tolist(), experts.tolist(), weights.tolist(), strict=True):
        expected = _plain(row, None if bias is None else bias.tolist(), routing)
        assert ids == list(expected)
        assert values == pytest.approx(list(expected.values()), rel=1e-5)


def test_of_equal_scores_the_lower_index_is_chosen() -> None:
    for routing in (ExpertRouting(3), ExpertRouting(3, scores="softmax of chosen")):
        experts, _ = REFERENCE.route(torch.zeros(2, 8), None, routing)
        assert experts.tolist() == [[0, 1, 2]] * 2


def test_a_mixture_is_the_weighted_sum_of_each_row_s_experts() -> None:
    source = torch.Generator().manual_seed(4)
    x, gate_up, down = (
        torch.randn(*shape, generator=source, dtype=torch.float64) for shape in ((17, 10), (6, 14, 10), (6, 10, 7))
    )
    experts, weights = REFERENCE.route(
        torch.randn(17, 6, generator=source, dtype=torch.float64), None, ExpertRouting(3)
    )
    got = REFERENCE.mix_experts(x, experts, weights, gate_up, down)
    for i, row in enumerate(x):
        expected = torch.zeros(10, dtype=torch.float64)
        for expert, weight in zip(experts[i].tolist(), weights[i], strict=True):
            gate, up = (gate_up[expert] @ row).chunk(2)
            expected += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(got[i], expected)
    assert REFERENCE.mix_experts(x[:0], experts[:0], weights[:0], gate_up, down).shape == (0, 10)
