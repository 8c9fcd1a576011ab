"""Choose experts for rows, and compute mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tandem_kernels.contract import ExpertRouting

_LEAST_SUM = 1e-20


def route(logits: torch.Tensor, bias: torch.Tensor | None, routing: ExpertRouting) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts of each row in ascending order, and their weights, both `[T, K]`. The exact result is
    defined in `tandem_kernels.contract`."""
    wide = logits.to(torch.float32)
    if routing.scores == "softmax of chosen":
        experts = _greatest(wide, routing.num_chosen)
        weights = torch.softmax(wide.gather(1, experts), dim=-1)
    else:
        scores = torch.softmax(wide, dim=-1) if routing.scores == "softmax" else wide.sigmoid()
        ranked = scores if bias is None else scores + bias
        if routing.num_groups > 1:
            ranked = _of_best_groups(ranked, routing)
        experts = _greatest(ranked, routing.num_chosen)
        weights = scores.gather(1, experts)
        if routing.is_normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
    experts, order = experts.sort(dim=1)
    return experts, (weights.gather(1, order) * routing.scaling).to(logits.dtype)


def mix_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Any,
    down: Any,
    *,
    linear: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor],
    silu_mul: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sum of each row's experts. The exact result is defined in `tandem_kernels.contract`.

    `linear`, `silu_mul`: the kernels of that name. `gate_up`, `down`: by expert, a matrix that `linear` takes."""
    num_chosen, chosen = experts.shape[1], experts.flatten()
    order = chosen.argsort(stable=True)
    counts = (chosen + 1).bincount(minlength=len(gate_up) + 1).tolist()
    parts = torch.zeros((len(chosen), x.shape[1]), dtype=x.dtype, device=x.device)
    for expert, places in enumerate(torch.split(order, counts), start=-1):
        if len(places) and expert >= 0:
            inner = silu_mul(linear(x[places // num_chosen], gate_up[expert], None))
            parts[places] = linear(inner, down[expert], None)
    parts = (parts.view(*experts.shape, x.shape[1]) * weights[..., None]).to(x.dtype)
    # One addition after the other, so that a row's sum does not depend on how torch reduces.
    total = parts[:, 0]
    for place in range(1, experts.shape[1]):
        total = total + parts[:, place]
    return total


def _greatest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` greatest scores of each row; of equal ones the lower index goes first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _of_best_groups(ranked: torch.Tensor, routing: ExpertRouting) -> torch.Tensor:
    """Return the scores with -inf for the experts of groups that may not be chosen from."""
    grouped = ranked.view(len(ranked), routing.num_groups, ranked.shape[1] // routing.num_groups)
    best = _greatest(grouped.topk(2, dim=-1).values.sum(dim=-1), routing.num_chosen_groups)
    is_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=ranked.device).scatter_(1, best, value=False)
    return grouped.masked_fill(is_out[..., None], float("-inf")).view(ranked.shape)
