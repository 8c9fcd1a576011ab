"""Turns checked slices of a plan into the tensors of one forward pass; never computes.

Numbers are gathered in lists and become tensors in two calls. After a model that has swept the caches each further
kind of call costs more than the numbers do: a batch of one row took half as long again with arrays all the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from tandem.sched.state.step_plan import ScheduledSlice
from tandem_kernels.contract import AttentionBatch


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens`, `positions`, `slots` are int64 `[T]`. `sampled_rows` holds, slice by slice, the rows that tokens are
    drawn from: none of a slice without a draw, else its last certain row and all that are guessed."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    attention: AttentionBatch
    sampled_rows: list[int]


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """Of a batch: `longs` are tokens, positions and slots, `shorts` the starts, the context lengths, and the tables one
    after the other."""

    longs: tuple[list[int], ...]
    shorts: tuple[list[int], ...]
    num_decodes: int
    max_rows: int
    sampled_rows: list[int]

    def batch(self, longs: Sequence[torch.Tensor], shorts: Sequence[torch.Tensor]) -> Batch:
        """The batch whose numbers these tensors hold, int64 and int32, in the same order."""
        tokens, positions, slots = longs
        starts, lens, tables = shorts
        attention = AttentionBatch(starts, lens, tables.view(len(lens), -1), self.num_decodes, self.max_rows)
        return Batch(tokens, positions, slots, attention, self.sampled_rows)


def numbers_of(slices: Sequence[ScheduledSlice], tokens: Sequence[Sequence[int]], block_size: int) -> BatchArrays:
    """`tokens[i]` are the ids of `slices[i]`, chained ones filled in. At least one slice."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled_rows: list[int] = []
    starts = [0]
    for piece, its_tokens in zip(slices, tokens, strict=True):
        places = range(piece.start, piece.stop)
        ids += its_tokens
        positions += places
        slots += [piece.blocks[place // block_size] * block_size + place % block_size for place in places]
        starts.append(len(ids))
        if piece.sampling is not None:
            sampled_rows += range(len(ids) - 1 - piece.num_drafted, len(ids))
    stops = [piece.stop for piece in slices]
    return BatchArrays(
        longs=(ids, positions, slots),
        shorts=(starts, stops, _tables(slices, stops, block_size)),
        num_decodes=next((i for i, piece in enumerate(slices) if piece.num_tokens > 1), len(slices)),
        max_rows=max(piece.num_tokens for piece in slices),
        sampled_rows=sampled_rows,
    )


def build_batch(slices: Sequence[ScheduledSlice], tokens: Sequence[Sequence[int]], block_size: int) -> Batch:
    """As `numbers_of`, in host memory."""
    numbers = numbers_of(slices, tokens, block_size)
    return numbers.batch(_split(numbers.longs, np.int64), _split(numbers.shorts, np.int32))


def _split(parts: Sequence[list[int]], dtype: type[np.int64 | np.int32]) -> list[torch.Tensor]:
    """Views of one array that holds all parts."""
    numbers: list[int] = []
    for part in parts:
        numbers += part
    whole = torch.from_numpy(np.array(numbers, dtype))
    stops = [*accumulate(map(len, parts), initial=0)]
    return [whole[start:stop] for start, stop in pairwise(stops)]


def _tables(slices: Sequence[ScheduledSlice], stops: Sequence[int], block_size: int) -> list[int]:
    """Block tables of one width, one after the other; a shorter one goes on with its first block."""
    width = -(-max(stops) // block_size)
    tables: list[int] = []
    for piece, stop in zip(slices, stops, strict=True):
        needed = -(-stop // block_size)
        tables += piece.blocks[:needed]
        tables += piece.blocks[:1] * (width - needed)
    return tables
