"""Draws tokens from logits; a function of logits, parameters, output index and known tokens alone, never of the batch.

`tandem_kernels.reference.sample` draws, at one uniform number of (seed, choice, index); `adjuster` says what comes
before its filters. Of equal logits the lower id goes first, in filters, alternatives and greedy draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tandem.core.events import SampledToken
from tandem.core.request import SamplingParams
from tandem.runtime.logits_processor import Adjust, GrammarExhausted
from tandem.sched.state.step_plan import Sampling
from tandem_kernels.reference.philox import uniform
from tandem_kernels.reference.sample import Filters, best, draw

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
            number = uniform(params.seed, sampling.choice, sampling.index + len(drawn))
            token = draw(logits, filters_of(params), number)
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
        except GrammarExhausted:
            return tuple(tokens), True
        return tuple(tokens), False


def filters_of(params: SamplingParams) -> Filters:
    """`temperature` is not 0."""
    log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
    return Filters(params.temperature, params.top_k, params.top_p, log_min_p)
