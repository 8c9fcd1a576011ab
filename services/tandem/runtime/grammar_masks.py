"""What an executor needs of grammars: which tokens may come next; owns no implementation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from tandem.core.grammar import Grammar
from tandem.core.ids import SeqId


class GrammarMasks(Protocol):
    """A function of grammar and output: what is remembered of a sequence only makes it fast. Called from one thread."""

    def allowed(self, seq: SeqId, grammar: Grammar, output: Sequence[int], stop_ids: frozenset[int]) -> torch.Tensor:
        """Bool `[vocab]`, on the CPU: the tokens that may follow `output`, all tokens that were drawn so far; those of
        `stop_ids` where the grammar may end; none where it must end and no token says so. Only read until the next
        call. Raises ValueError when `output` breaks the grammar or the grammar is none, and INVALID_REQUEST when it
        takes more work than a step may wait for."""
        ...

    def retain(self, seqs: Collection[SeqId]) -> None:
        """Only these are likely to be asked for again; what is remembered of others may be forgotten."""
        ...
