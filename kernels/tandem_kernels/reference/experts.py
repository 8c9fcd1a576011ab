"""Choose experts for rows, and compute mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem_kernels.contract import ExpertRouting

_LEAST_SUM = 1e-20


def route(logits: torch.Tensor, bias: torch.Tensor | None, routing: ExpertRouting) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts of each row in ascending order, and their weights, both `[T, K]`. The exact result is
    defined in `tandem_kernels.contract`."""
    wide = logits.to(torch.float32)
    if routing.scores == "softmax of chosen":
        chosen, experts = wide.topk(routing.num_chosen, dim=-1)
        weights = torch.softmax(chosen, dim=-1)
    else:
        scores = torch.softmax(wide, dim=-1) if routing.scores == "softmax" else wide.sigmoid()
        ranked = scores if bias is None else scores + bias
        if routing.num_groups > 1:
            ranked = _of_best_groups(ranked, routing)
        experts = ranked.topk(routing.num_chosen, dim=-1).indices
        weights = scores.gather(1, experts)
        if routing.is_normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
    experts, order = experts.sort(dim=1)
    return experts, (weights.gather(1, order) * routing.scaling).to(logits.dtype)


def mix_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
    silu_mul: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sum of each row's experts. The exact result is defined in `tandem_kernels.contract`.

    `linear`, `silu_mul`: the kernels of that name."""
    parts = torch.empty((*experts.shape, x.shape[1]), dtype=x.dtype, device=x.device)
    for expert in torch.unique(experts).tolist():
        rows, places = (experts == expert).nonzero(as_tuple=True)
        parts[rows, places] = linear(silu_mul(linear(x[rows], gate_up[expert], None)), down[expert], None)
    parts *= weights[..., None]
    # One addition after the other, so that a row's sum does not depend on how torch reduces.
    total = parts[:, 0]
    for place in range(1, experts.shape[1]):
        total = total + parts[:, place]
    return total


def _of_best_groups(ranked: torch.Tensor, routing: ExpertRouting) -> torch.Tensor:
    """Return the scores with -inf for the experts of groups that may not be chosen from."""
    grouped = ranked.view(len(ranked), routing.num_groups, ranked.shape[1] // routing.num_groups)
    best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(routing.num_chosen_groups, dim=-1).indices
    is_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=ranked.device).scatter_(1, best, value=False)
    return grouped.masked_fill(is_out[..., None], float("-inf")).view(ranked.shape)
