"""Turns checked slices of a plan into the tensors of one forward pass; never computes.

Numbers are gathered in lists and become tensors in two calls. After a model that has swept the caches each further
kind of call costs more than the numbers do: a batch of one row took half as long again with arrays all the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.sched.plan import Slice
from tandem_kernels.contract import AttentionBatch


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens`, `positions`, `slots` are int64 `[T]`. `drawn_rows` holds, slice by slice, the rows that tokens are
    drawn from: none of a slice without a draw, else its last certain row and all that are guessed."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    attention: AttentionBatch
    drawn_rows: list[int]


@dataclass(frozen=True, slots=True)
class Numbers:
    """Of a batch: `rows` are tokens, positions and slots one after the other, `num_rows` each; `sequences` the starts,
    the context lengths and the tables of `num_sequences`."""

    rows: list[int]
    sequences: list[int]
    num_rows: int
    num_sequences: int
    num_decodes: int
    max_rows: int
    drawn_rows: list[int]

    def batch(self, rows: torch.Tensor, sequences: torch.Tensor) -> Batch:
        """The batch whose numbers these tensors, int64 and int32, hold in the same order."""
        starts, lens = self.num_sequences + 1, 2 * self.num_sequences + 1
        return Batch(
            tokens=rows[: self.num_rows],
            positions=rows[self.num_rows : 2 * self.num_rows],
            slots=rows[2 * self.num_rows :],
            attention=AttentionBatch(
                query_starts=sequences[:starts],
                context_lens=sequences[starts:lens],
                block_tables=sequences[lens:].view(self.num_sequences, -1),
                num_decodes=self.num_decodes,
                max_rows=self.max_rows,
            ),
            drawn_rows=self.drawn_rows,
        )


def numbers_of(slices: Sequence[Slice], tokens: Sequence[Sequence[int]], block_size: int) -> Numbers:
    """`tokens[i]` are the ids of `slices[i]`, chained ones filled in. At least one slice."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    drawn_rows: list[int] = []
    starts = [0]
    for piece, its_tokens in zip(slices, tokens, strict=True):
        places = range(piece.start, piece.stop)
        ids += its_tokens
        positions += places
        slots += [piece.blocks[place // block_size] * block_size + place % block_size for place in places]
        starts.append(len(ids))
        if piece.sampling is not None:
            drawn_rows += range(len(ids) - 1 - piece.num_drafted, len(ids))
    stops = [piece.stop for piece in slices]
    return Numbers(
        rows=ids + positions + slots,
        sequences=starts + stops + _tables(slices, stops, block_size),
        num_rows=len(ids),
        num_sequences=len(slices),
        num_decodes=next((i for i, piece in enumerate(slices) if piece.num_tokens > 1), len(slices)),
        max_rows=max(piece.num_tokens for piece in slices),
        drawn_rows=drawn_rows,
    )


def build_batch(slices: Sequence[Slice], tokens: Sequence[Sequence[int]], block_size: int) -> Batch:
    """As `numbers_of`, in host memory."""
    numbers = numbers_of(slices, tokens, block_size)
    rows = torch.from_numpy(np.array(numbers.rows, np.int64))
    return numbers.batch(rows, torch.from_numpy(np.array(numbers.sequences, np.int32)))


def _tables(slices: Sequence[Slice], stops: Sequence[int], block_size: int) -> list[int]:
    """Block tables of one width, one after the other; a shorter one goes on with its first block."""
    width = -(-max(stops) // block_size)
    tables: list[int] = []
    for piece, stop in zip(slices, stops, strict=True):
        needed = -(-stop // block_size)
        tables += piece.blocks[:needed]
        tables += piece.blocks[:1] * (width - needed)
    return tables
