"""Draws tokens from logits; a function of logits, parameters, output index and known tokens alone, never of the batch.

A draw inverts the cumulative distribution over the kept tokens in ascending order of their ids, in float64, at one
uniform number of (seed, choice, index). Filters apply in the order of transformers: temperature, top-k, top-p, min-p,
each on what the one before left; `adjuster` says what comes before them. Of equal logits the lower id goes first, in
filters, alternatives and greedy draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tandem.core.events import SampledToken
from tandem.core.request import SamplingParams
from tandem.runtime.adjuster import Adjust, OutputComplete
from tandem.runtime.philox import uniform
from tandem.sched.plan import Sampling

# A nucleus is nearly always within so many tokens; a full sort of the vocabulary is the exception.
_NUCLEUS_GUESS = 1024
_NUMPY_BYTES = 4
"""Smaller floats are not all known to numpy."""


class LogitRows:
    """Logits `[rows, vocab]` of one step. Each row's greatest value is found for all rows in one go: after a model that
    has swept the caches the first call of anything costs ten times a later one."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._values = (logits.float() if logits.dtype.itemsize < _NUMPY_BYTES else logits).numpy()
        # Of equal values the first one is taken; of a row with a NaN the first NaN, for both.
        self._greatest: list[int] = self._values.argmax(axis=1).tolist()
        self._least: list[int] = self._values.argmin(axis=1).tolist()

    def sample(
        self, row: int, sampling: Sampling, drawn: Sequence[int] = (), adjust: Adjust | None = None
    ) -> SampledToken:
        """Draw a token from one row, after those that this step drew before it. Log probabilities are those of the row
        as it came, whatever `adjust` makes of it. Raises ValueError when the row is not finite, and what `adjust`
        raises."""
        params, token = sampling.params, self._greatest[row]
        if not all(math.isfinite(self._values.item(row, end)) for end in (token, self._least[row])):
            raise ValueError("logits are not finite")
        if params.temperature == 0 and params.logprobs is None and adjust is None:
            return SampledToken(token)
        logits = self._logits[row].to(torch.float64, copy=adjust is not None)
        logprobs = None if params.logprobs is None else torch.log_softmax(logits, dim=-1)
        if adjust is not None:
            adjust(logits, drawn)
            # Of equal ones numpy takes the first.
            token = int(logits.numpy().argmax())
        if params.temperature != 0:
            token = _draw(logits, params, uniform(params.seed, sampling.choice, sampling.index + len(drawn)))
        if params.logprobs is None or logprobs is None:
            return SampledToken(token)
        top = best(logprobs, params.logprobs)
        alternatives = tuple(zip(top.tolist(), logprobs[top].tolist(), strict=True))
        return SampledToken(token, float(logprobs[token]), alternatives)

    def sample_while_guessed(
        self, row: int, sampling: Sampling, guesses: Sequence[int], adjust: Adjust | None = None
    ) -> tuple[tuple[SampledToken, ...], bool]:
        """Draw from `row`, and from each row after it for as long as what was drawn is what was guessed; and whether
        the output is complete with that.

        Row i of them stands for the context that ends with guess i - 1, so the first wrong guess makes all later ones
        void. Raises ValueError as `sample` does, for rows that are drawn from.
        """
        tokens: list[SampledToken] = []
        try:
            for i, guess in enumerate((*guesses, None)):
                tokens.append(self.sample(row + i, sampling, guesses[:i], adjust))
                if tokens[-1].id != guess:
                    break
        except OutputComplete:
            return tuple(tokens), True
        return tuple(tokens), False


def best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` greatest values (all when there are fewer), best first, equal ones by ascending id."""
    count = min(count, values.numel())
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    threshold = torch.topk(values, count).values[-1]
    candidates = torch.nonzero(values >= threshold).flatten()
    order = torch.sort(values[candidates], descending=True, stable=True).indices
    return candidates[order][:count]


def kept_tokens(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Ascending ids that the filters leave of a float64 row `[vocab]`; at least one. `temperature` is not 0."""
    scaled = _scaled(logits, params.temperature)
    ids: torch.Tensor | None = best(scaled, params.top_k) if params.top_k else None
    if params.top_p < 1:
        ids = _nucleus(scaled, ids, params.top_p)
    if params.min_p > 0:
        ids = torch.arange(scaled.numel()) if ids is None else ids
        ids = ids[scaled[ids] >= math.log(params.min_p)]
    return torch.arange(scaled.numel()) if ids is None else ids.sort().values


def _draw(logits: torch.Tensor, params: SamplingParams, number: float) -> int:
    ids = kept_tokens(logits, params)
    cumulative = torch.exp(_scaled(logits, params.temperature)[ids]).cumsum(0)
    # A number of 53 bits below 1 times the sum is below the sum, so what is found has weight.
    return int(ids[torch.searchsorted(cumulative, number * cumulative[-1], right=True)])


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log weights whose greatest is 0, so that no temperature, however small, makes an infinity of them."""
    return (logits - logits.max()) / temperature


def _nucleus(scaled: torch.Tensor, ids: torch.Tensor | None, top_p: float) -> torch.Tensor:
    """The fewest best tokens whose share reaches `top_p`, best first, out of `ids` (best first; None: all)."""
    if ids is not None:
        return _shortest_prefix(scaled, ids, torch.logsumexp(scaled[ids], 0), top_p)
    total = torch.logsumexp(scaled, 0)
    guess = best(scaled, _NUCLEUS_GUESS)
    covered = torch.exp(scaled[guess] - total).sum()
    if covered < top_p:
        guess = best(scaled, scaled.numel())
    return _shortest_prefix(scaled, guess, total, top_p)


def _shortest_prefix(scaled: torch.Tensor, ids: torch.Tensor, total: torch.Tensor, top_p: float) -> torch.Tensor:
    shares = torch.exp(scaled[ids] - total).cumsum(0)
    count = int((shares < top_p).sum()) + 1
    return ids[:count]
