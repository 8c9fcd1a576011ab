"""Logits as the parameters of a sequence change them before any filter; never draws a token.

In the order of `SamplingParams`: repetition, presence, frequency, bias, `min_tokens`, grammar. All of it is a function
of the logits and the tokens known so far; what is remembered between draws saves counting them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
import torch

from tandem.core.ids import SeqId
from tandem.core.request import SamplingParams
from tandem.runtime.grammar_masks import GrammarMasks
from tandem.runtime.token_counts import TokenCounts
from tandem.sched.state.step_plan import Sampling

Adjust = Callable[[torch.Tensor, Sequence[int]], None]
"""`adjust(logits, drawn)` changes a float64 row `[vocab]` in place; `drawn` are the tokens that this step drew before
it. Forbidden tokens become -inf, but never all. Raises OutputComplete or ValueError when no token may be drawn."""


class GrammarExhausted(Exception):
    """By its grammar nothing may follow an output, and no token would say so."""


class LogitsProcessor:
    """Of the sequences of one executor. Without `grammars` a sequence that has a grammar is refused."""

    def __init__(self, grammars: GrammarMasks | None = None) -> None:
        self.grammars = grammars
        self._counts: dict[SeqId, TokenCounts] = {}

    def adjust(self, seq: SeqId, sampling: Sampling) -> Adjust | None:
        """How the rows of one draw are changed; None: not at all."""
        params = sampling.params
        is_plain = not (params.needs_history or params.logit_bias or sampling.index < params.min_tokens)
        return None if is_plain else partial(self._apply, seq, sampling)

    def retain(self, seqs: Collection[SeqId]) -> None:
        """Only these are likely to be asked for again."""
        self._counts = {seq: counts for seq, counts in self._counts.items() if seq in seqs}
        if self.grammars is not None:
            self.grammars.retain(seqs)

    def _apply(self, seq: SeqId, sampling: Sampling, logits: torch.Tensor, drawn: Sequence[int]) -> None:
        params = sampling.params
        output = (*sampling.output, *drawn) if drawn else sampling.output
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            self._penalize(seq, sampling, logits, output)
        row = logits.numpy()
        for token, bias in params.logit_bias:
            row[token] += bias
        stops = [token for token in params.stop_token_ids if token < len(row)]
        has_min = sampling.index + len(drawn) < params.min_tokens
        if params.grammar is not None:
            allowed = self._allowed(seq, params, output)
            if not allowed.any():
                raise GrammarExhausted
            logits.masked_fill_(~allowed, -torch.inf)
            # Where a grammar must end, it does.
            has_min = has_min and int(allowed.sum()) > int(allowed[stops].sum())
        if has_min and stops:
            logits[stops] = -torch.inf
        if (has_min or params.grammar is not None) and not torch.any(logits > -torch.inf):
            raise ValueError("no token may follow")

    def _penalize(self, seq: SeqId, sampling: Sampling, logits: torch.Tensor, output: tuple[int, ...]) -> None:
        params = sampling.params
        counted = self._count(seq, sampling.prompt if params.repetition_penalty != 1 else (), output)
        row, ids, counts = logits.numpy(), counted.ids, counted.counts
        values = row[ids]
        values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        row[ids] = values - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts

    def _count(self, seq: SeqId, prompt: tuple[int, ...], output: tuple[int, ...]) -> TokenCounts:
        counts = self._counts.get(seq)
        if counts is None or not counts.begins(prompt, output):
            counts = self._counts[seq] = TokenCounts(prompt)
        counts.grow(output)
        return counts

    def _allowed(self, seq: SeqId, params: SamplingParams, output: tuple[int, ...]) -> torch.Tensor:
        if params.grammar is None or self.grammars is None:
            raise ValueError("this worker knows no grammars")
        return self.grammars.allowed(seq, params.grammar, output, params.stop_token_ids)

    def __repr__(self) -> str:
        return f"<adjuster of {len(self._counts)} sequences, {'with' if self.grammars else 'without'} grammars>"
