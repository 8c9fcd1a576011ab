"""Define the interface through which an executor queries the tokens that a grammar allows next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from tandem.core.grammar import Grammar
from tandem.core.ids import SeqId


class GrammarMasks(Protocol):
    """Token masks as a pure function of grammar and output; state kept per sequence is only a cache.

    Called from one thread."""

    def allowed(self, seq: SeqId, grammar: Grammar, output: Sequence[int], stop_ids: frozenset[int]) -> torch.Tensor:
        """Return which tokens may follow `output`, as bool `[vocab]` on the CPU, valid until the next call.

        `output` are all tokens sampled so far. `stop_ids` are allowed where the grammar may end. No token is allowed
        where the grammar must end and has no end token. Raises ValueError when `output` violates the grammar or the
        grammar is invalid, and TandemError(INVALID_REQUEST) when the mask takes more work than a step may spend."""
        ...

    def retain(self, seqs: Collection[SeqId]) -> None:
        """Drop the cached state of all sequences but `seqs`."""
        ...
