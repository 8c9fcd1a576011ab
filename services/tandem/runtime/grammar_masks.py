"""Define the interface through which an executor queries the tokens that a grammar allows next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from tandem.core.grammar import Grammar
from tandem.core.ids import SeqId


class GrammarMasks(Protocol):
    """Source of the tokens that a grammar allows after an output.

    Results depend on grammar and output alone; what is stored per sequence is only a cache. `allowed` and `retain` are
    called from one thread."""

    def allowed(self, seq: SeqId, grammar: Grammar, output: Sequence[int], stop_ids: frozenset[int]) -> torch.Tensor:
        """Return which tokens may follow `output` in the sequence `seq`, as bool `[vocab]` on the CPU.

        The result is valid until the next call. `output` are all tokens that the sequence has sampled so far.
        `stop_ids`, the request's stop tokens, are allowed where the grammar may end. No token is allowed where the
        grammar must end and there is no end token. Raises ValueError when `output` violates the grammar or the grammar
        is invalid, and TandemError(INVALID_REQUEST) when the mask takes more work than a step may spend."""
        ...

    def retain(self, seqs: Collection[SeqId]) -> None:
        """Drop the cached matching state of all sequences that are not in `seqs`."""
        ...
