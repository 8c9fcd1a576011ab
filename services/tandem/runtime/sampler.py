"""Sample tokens on the host from logits, so that a token does not depend on the other sequences of the batch.

A token is a function of the logits, the sampling parameters, the index of the token in the output and the tokens before
it. `tandem_kernels.reference.sample` filters the logits and samples with one uniform number that is a function of
(seed, choice, index); `logits_processor` changes the logits before the filters. Among equal logits the lower id goes
first, in filters, alternatives and greedy sampling.
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
from tandem_kernels.reference.sample import Filters, best, sample_token

_NUMPY_BYTES = 4
"""Size of float32. numpy lacks some of the smaller float types, so those are converted."""


class LogitRows:
    """Logits `[rows, vocab]` of one step in host memory, from which tokens are sampled.

    The constructor finds the greatest and the least value of every row, for all rows at once. After a forward pass has
    evicted the CPU caches, the first call of an operation costs ten times as much as a later one, so a call per row
    would be slower."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._values = (logits.float() if logits.dtype.itemsize < _NUMPY_BYTES else logits).numpy()
        # numpy takes the first of equal values, and the first NaN of a row with NaNs, in argmax and argmin.
        self._greatest: list[int] = self._values.argmax(axis=1).tolist()
        self._least: list[int] = self._values.argmin(axis=1).tolist()

    def sample(
        self, row: int, sampling: Sampling, accepted: Sequence[int] = (), adjust: Adjust | None = None
    ) -> SampledToken:
        """Sample a token from row `row` and return it, with log probabilities if `sampling` requests them.

        `accepted` are the tokens that this step has already sampled for the sequence. `adjust` changes the logits
        before sampling; log probabilities are those of the unchanged row. Raises ValueError when the row is not finite,
        and what `adjust` raises."""
        params, token = sampling.params, self._greatest[row]
        if not all(math.isfinite(self._values.item(row, end)) for end in (token, self._least[row])):
            raise ValueError("the model computed logits that are not finite")
        if params.temperature == 0 and params.logprobs is None and adjust is None:
            return SampledToken(token)
        logits = self._logits[row].to(torch.float64, copy=adjust is not None)
        logprobs = None if params.logprobs is None else torch.log_softmax(logits, dim=-1)
        if adjust is not None:
            adjust(logits, accepted)
            # numpy takes the first of equal values.
            token = int(logits.numpy().argmax())
        if params.temperature != 0:
            number = uniform(params.seed, sampling.choice, sampling.index + len(accepted))
            token = sample_token(logits, filters_of(params), number)
        if params.logprobs is None or logprobs is None:
            return SampledToken(token)
        top = best(logprobs, params.logprobs)
        alternatives = tuple(zip(top.tolist(), logprobs[top].tolist(), strict=True))
        return SampledToken(token, float(logprobs[token]), alternatives)

    def sample_and_verify(
        self, row: int, sampling: Sampling, drafted: Sequence[int], adjust: Adjust | None = None
    ) -> tuple[tuple[SampledToken, ...], bool]:
        """Sample tokens from `row` and, as long as they equal the draft tokens, from the rows after it.

        Returns the sampled tokens, and whether the grammar has ended the output. `drafted`: the draft tokens. Row `row
        + i` was computed with the first i of them as context, so it is sampled only if the i tokens before it were
        sampled as drafted. Raises ValueError when a row that is sampled is not finite, and what `adjust` raises except
        GrammarExhausted."""
        tokens: list[SampledToken] = []
        try:
            for i, draft_token in enumerate((*drafted, None)):
                tokens.append(self.sample(row + i, sampling, drafted[:i], adjust))
                if tokens[-1].id != draft_token:
                    break
        except GrammarExhausted:
            return tuple(tokens), True
        return tuple(tokens), False


def filters_of(params: SamplingParams) -> Filters:
    """Return the sampling filters (temperature, top_k, top_p, min_p) for parameters whose `temperature` is not 0."""
    log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
    return Filters(params.temperature, params.top_k, params.top_p, log_min_p)
