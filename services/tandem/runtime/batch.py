"""Turns checked slices of a plan into the tensors of one forward pass; never computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from tandem.sched.plan import Slice
from tandem_kernels.contract import AttentionBatch


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens`, `positions`, `slots` are int64 `[T]`. `drawn_rows` int64 holds, slice by slice, the rows that tokens
    are drawn from: none of a slice without a draw, else its last certain row and all that are guessed."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    attention: AttentionBatch
    drawn_rows: torch.Tensor


def build_batch(slices: Sequence[Slice], tokens: Sequence[Sequence[int]], block_size: int) -> Batch:
    """`tokens[i]` are the ids of `slices[i]`, chained ones filled in. At least one slice."""
    counts = np.array([s.num_tokens for s in slices])
    ends = counts.cumsum()
    stops = np.array([s.stop for s in slices])
    rows = np.repeat(np.arange(len(slices)), counts)
    # A row's place among all rows, less where its slice begins there, plus where the slice begins in its sequence.
    positions = np.arange(ends[-1]) + (stops - ends)[rows]
    tables = _tables(slices, block_size)
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return Batch(
        tokens=torch.from_numpy(np.fromiter(chain.from_iterable(tokens), np.int64, ends[-1])),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        attention=AttentionBatch(
            query_starts=torch.from_numpy(np.concatenate(((0,), ends)).astype(np.int32)),
            context_lens=torch.from_numpy(stops.astype(np.int32)),
            block_tables=torch.from_numpy(tables),
        ),
        drawn_rows=torch.tensor(_drawn_rows(slices, ends.tolist()), dtype=torch.int64),
    )


def _drawn_rows(slices: Sequence[Slice], ends: Sequence[int]) -> list[int]:
    drawing = [(piece, end) for piece, end in zip(slices, ends, strict=True) if piece.sampling is not None]
    return [row for piece, end in drawing for row in range(end - 1 - piece.num_drafted, end)]


def _tables(slices: Sequence[Slice], block_size: int) -> npt.NDArray[np.int32]:
    """Block tables of one width; a shorter one goes on with its first block."""
    needed = [-(-piece.stop // block_size) for piece in slices]
    tables = np.empty((len(slices), max(needed)), np.int32)
    for table, piece, count in zip(tables, slices, needed, strict=True):
        table[:count] = piece.blocks[:count]
        table[count:] = piece.blocks[0]
    return tables
