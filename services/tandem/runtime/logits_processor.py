"""Change logits by a sequence's parameters before any sampling filter: penalties, biases, `min_tokens`, grammar.

The order is repetition, presence and frequency penalty, logit bias, grammar, `min_tokens`. The result is a function of
the logits and the tokens known so far; counts kept between steps only save counting the tokens again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from tandem.core.ids import SeqId
from tandem.core.request import SamplingParams
from tandem.runtime.token_counts import TokenCounts
from tandem.sched.state.step_plan import Sampling

if TYPE_CHECKING:
    from tandem.runtime.grammar_engine import LlguidanceMasks

Adjust = Callable[[torch.Tensor, Sequence[int]], None]
"""Function `adjust(logits, accepted)` that changes a float64 row `[vocab]` in place; `accepted` are the tokens that
this step sampled before it. Forbidden tokens become -inf, but never all: it raises GrammarExhausted or ValueError when
no token is allowed."""

MAX_LOGIT = 1e300
"""Greatest logit after penalties: a tiny repetition penalty would make it infinite, and its probability no number."""


class GrammarExhausted(Exception):
    """Raised when the grammar allows no further token and there is no end token to sample: the output is complete."""


class LogitsProcessor:
    """Builds, for each sampling, the function that applies penalties, biases, `min_tokens` and grammar to the logits.

    It keeps the token counts of an executor's sequences between steps. Without `grammars` the function of a sequence
    with a grammar raises ValueError."""

    def __init__(self, grammars: LlguidanceMasks | None = None) -> None:
        self.grammars = grammars
        self._counts: dict[SeqId, TokenCounts] = {}

    def adjust(self, seq: SeqId, sampling: Sampling) -> Adjust | None:
        """Return the function that changes the logits of sequence `seq` before sampling; None if none is needed.

        `sampling`: parameters and known tokens of the sequence. See `Adjust` for the function."""
        params = sampling.params
        is_plain = not (params.needs_history or params.logit_bias or sampling.index < params.min_tokens)
        return None if is_plain else partial(self._apply, seq, sampling)

    def retain(self, seqs: Collection[SeqId]) -> None:
        """Drop the token counts and the grammar state of all sequences that are not in `seqs`.

        Both are only caches: a dropped sequence is counted and matched again if it is used again."""
        self._counts = {seq: counts for seq, counts in self._counts.items() if seq in seqs}
        if self.grammars is not None:
            self.grammars.retain(seqs)

    def _apply(self, seq: SeqId, sampling: Sampling, logits: torch.Tensor, accepted: Sequence[int]) -> None:
        params = sampling.params
        output = (*sampling.output, *accepted) if accepted else sampling.output
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            self._penalize(seq, sampling, logits, output)
        row = logits.numpy()
        for token, bias in params.logit_bias:
            row[token] += bias
        stops = [token for token in params.stop_token_ids if token < len(row)]
        has_min = sampling.index + len(accepted) < params.min_tokens
        if params.grammar is not None:
            allowed = self._allowed(seq, params, output)
            if not allowed.any():
                raise GrammarExhausted
            logits.masked_fill_(~allowed, -torch.inf)
            # A grammar that allows only stop tokens ends the output even before `min_tokens`.
            has_min = has_min and int(allowed.sum()) > int(allowed[stops].sum())
        if has_min and stops:
            logits[stops] = -torch.inf
        if (has_min or params.grammar is not None) and not torch.any(logits > -torch.inf):
            raise ValueError("the grammar of this request lets no token follow")

    def _penalize(self, seq: SeqId, sampling: Sampling, logits: torch.Tensor, output: tuple[int, ...]) -> None:
        params = sampling.params
        counted = self._count(seq, sampling.prompt if params.repetition_penalty != 1 else (), output)
        row, ids, counts = logits.numpy(), counted.ids, counted.counts
        values = row[ids]
        with np.errstate(over="ignore"):
            values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        row[ids] = (
            np.minimum(values, MAX_LOGIT) - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts
        )

    def _count(self, seq: SeqId, prompt: tuple[int, ...], output: tuple[int, ...]) -> TokenCounts:
        counts = self._counts.get(seq)
        if counts is None or not counts.is_prefix_of(prompt, output):
            counts = self._counts[seq] = TokenCounts(prompt)
        counts.extend(output)
        return counts

    def _allowed(self, seq: SeqId, params: SamplingParams, output: tuple[int, ...]) -> torch.Tensor:
        if params.grammar is None or self.grammars is None:
            raise ValueError("this worker cannot follow a grammar: llguidance does not support the model's tokenizer")
        return self.grammars.allowed(seq, params.grammar, output, params.stop_token_ids)

    def __repr__(self) -> str:
        return f"<logits processor of {len(self._counts)} sequences, {'with' if self.grammars else 'without'} grammars>"
