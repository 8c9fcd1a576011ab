"""Turns checked slices of a plan into the tensors of one forward pass; never computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.core.ids import BlockId
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
    counts = torch.tensor([s.num_tokens for s in slices])
    ends = counts.cumsum(0)
    width = max(-(-s.stop // block_size) for s in slices)
    tables = torch.tensor([_padded_table(s, width, block_size) for s in slices])
    positions = torch.cat([torch.arange(s.start, s.stop) for s in slices])
    rows = torch.repeat_interleave(torch.arange(len(slices)), counts)
    return Batch(
        tokens=torch.tensor([token for ids in tokens for token in ids]),
        positions=positions,
        slots=tables[rows, positions // block_size] * block_size + positions % block_size,
        attention=AttentionBatch(
            query_starts=torch.cat((ends.new_zeros(1), ends)).to(torch.int32),
            context_lens=torch.tensor([s.stop for s in slices], dtype=torch.int32),
            block_tables=tables.to(torch.int32),
        ),
        drawn_rows=torch.tensor(_drawn_rows(slices, ends.tolist()), dtype=torch.int64),
    )


def _drawn_rows(slices: Sequence[Slice], ends: Sequence[int]) -> list[int]:
    drawing = [(piece, end) for piece, end in zip(slices, ends, strict=True) if piece.sampling is not None]
    return [row for piece, end in drawing for row in range(end - 1 - piece.num_drafted, end)]


def _padded_table(piece: Slice, width: int, block_size: int) -> list[BlockId]:
    needed = list(piece.blocks[: -(-piece.stop // block_size)])
    return needed + needed[:1] * (width - len(needed))
