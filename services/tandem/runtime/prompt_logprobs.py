"""Compute log probabilities of known tokens a few rows at a time, so that a prompt's logits are never held at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tandem.core.events import SampledToken
from tandem_kernels.reference.sample import best

PIECE_BYTES = 16 << 20
"""Upper bound on the float64 logits that are held at a time."""


def compute_prompt_logprobs(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    tokens: Sequence[int],
    num_top: int,
    vocab_size: int,
) -> tuple[SampledToken, ...]:
    """Return the log probability of each of `tokens`, with the `num_top` most likely tokens at its position.

    `hidden` is `[len(tokens), hidden]`; row i is the hidden row of the token before `tokens[i]`. `head` computes logits
    `[rows, vocab_size]` from hidden rows. Raises ValueError when logits are not finite."""
    size = max(1, PIECE_BYTES // (vocab_size * 8))
    scores: list[SampledToken] = []
    for start in range(0, len(tokens), size):
        stop = min(start + size, len(tokens))
        scores += _score(head(hidden[start:stop]), tokens[start:stop], num_top)
    return tuple(scores)


def _score(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[SampledToken]:
    if not all(math.isfinite(float(end)) for end in torch.aminmax(logits)):
        raise ValueError("the model computed logits that are not finite")
    logits = logits.to(torch.float64)
    totals = torch.logsumexp(logits, 1, keepdim=True)
    known = (logits.gather(1, torch.tensor(tokens)[:, None]) - totals).flatten().tolist()
    ids = best_of_rows(logits, num_top)
    values = (logits.gather(1, ids) - totals).tolist()
    tops = [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values, strict=True)]
    return [SampledToken(*scored) for scored in zip(tokens, known, tops, strict=True)]


def best_of_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the column indices of the `count` greatest values of each row of `rows`, greatest first.

    `rows` is `[rows, vocab]`, so the indices are token ids; equal values are in the order of their ids. The result is
    int64 `[rows, min(count, vocab)]`."""
    count = min(count, rows.shape[1])
    if count == 0:
        return torch.empty((len(rows), 0), dtype=torch.int64)
    # topk returns equal values in any order, and an arbitrary subset of those equal to the last: sorted and fixed here.
    ids = rows.topk(count).indices.sort(1).values
    values = rows.gather(1, ids)
    order = values.sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    has_cut_tie = (rows >= values.amin(1, keepdim=True)).sum(1) > count
    for row in has_cut_tie.nonzero().flatten().tolist():
        ids[row] = best(rows[row], count)
    return ids
