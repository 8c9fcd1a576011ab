"""Sample tokens from logits, row by row.

Sampling inverts the cumulative distribution over the kept tokens, in ascending order of their ids and in float64, at
one uniform number. Filters apply in the order of transformers, each to what the previous one kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem_kernels.contract import SamplingRows
from tandem_kernels.reference.philox import uniform

# Tokens that are tried first for top-p; nearly always they suffice, and the vocabulary need not be sorted.
_TOP_P_CANDIDATES = 1024
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Filters:
    """Sampling parameters of one row, with the meanings of `contract.SamplingRows`; `temperature` must not be 0."""

    temperature: float
    top_k: int
    top_p: float
    log_min_p: float


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return one sampled token id for each row of `logits` `[R, V]`; -1 for a row with a number that is not finite. The
    exact result is defined in `tandem_kernels.contract`."""
    tokens = torch.full((len(logits),), -1)
    for row, values in enumerate(logits):
        if not bool(values.isfinite().all()):
            continue
        temperature = float(rows.temperature[row])
        if temperature == 0:
            tokens[row] = best(values, 1)[0]
            continue
        filters = Filters(temperature, int(rows.top_k[row]), float(rows.top_p[row]), float(rows.log_min_p[row]))
        number = uniform(int(rows.seed[row]) & _MASK64, int(rows.choice[row]), int(rows.index[row]))
        tokens[row] = sample_token(values.to(torch.float64), filters, number)
    return tokens


def best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the `count` greatest values (all if there are fewer), greatest first, ties by ascending id."""
    count = min(count, values.numel())
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    threshold = torch.topk(values, count).values[-1]
    candidates = torch.nonzero(values >= threshold).flatten()
    order = torch.sort(values[candidates], descending=True, stable=True).indices
    return candidates[order][:count]


def kept_tokens(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return the ids of a float64 row of logits `[vocab]` that the filters keep, ascending; at least one."""
    scaled = _scaled(logits, filters.temperature)
    ids: torch.Tensor | None = best(scaled, filters.top_k) if filters.top_k else None
    if filters.top_p < 1:
        ids = _nucleus(scaled, ids, filters.top_p)
    if filters.log_min_p > -torch.inf:
        ids = torch.arange(scaled.numel()) if ids is None else ids
        ids = ids[scaled[ids] >= filters.log_min_p]
    return torch.arange(scaled.numel()) if ids is None else ids.sort().values


def sample_token(logits: torch.Tensor, filters: Filters, number: float) -> int:
    """Return the token that a float64 row of logits `[vocab]` gives after the filters for `number`, a uniform random
    number in [0, 1)."""
    ids = kept_tokens(logits, filters)
    cumulative = torch.exp(_scaled(logits, filters.temperature)[ids]).cumsum(0)
    # A 53-bit number below 1 times the sum is below the sum, so the token found has a positive weight.
    return int(ids[torch.searchsorted(cumulative, number * cumulative[-1], right=True)])


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log weights, shifted so that the greatest is 0 and a small temperature cannot overflow to infinity."""
    return (logits - logits.max()) / temperature


def _nucleus(scaled: torch.Tensor, ids: torch.Tensor | None, top_p: float) -> torch.Tensor:
    """Return the fewest greatest tokens whose probability reaches `top_p`, greatest first.

    `ids` are the candidates, greatest first; None for all tokens."""
    if ids is not None:
        return _shortest_prefix(scaled, ids, torch.logsumexp(scaled[ids], 0), top_p)
    total = torch.logsumexp(scaled, 0)
    candidates = best(scaled, _TOP_P_CANDIDATES)
    covered = torch.exp(scaled[candidates] - total).sum()
    if covered < top_p:
        candidates = best(scaled, scaled.numel())
    return _shortest_prefix(scaled, candidates, total, top_p)


def _shortest_prefix(scaled: torch.Tensor, ids: torch.Tensor, total: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the shortest prefix of `ids` whose probability reaches `top_p`; `total` is the log of all weights."""
    probabilities = torch.exp(scaled[ids] - total).cumsum(0)
    count = int((probabilities < top_p).sum()) + 1
    return ids[:count]
