"""Build the input tensors of one forward pass from slices of a plan that have been checked against the KV pool.

Values are gathered in Python lists and become tensors in two calls. After a forward pass has evicted the CPU caches,
each call of a further numpy or torch function costs more than the list operations: building a batch of one row took
half as long again with numpy arrays throughout.
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
    """Inputs of one forward pass over T rows, a row being one token of one sequence.

    `tokens`, `positions`, `slots`: int64 `[T]`, the token id of each row, its position in its sequence, and the KV slot
    (block number times block size plus offset) that its KV is written to. `attention`: query starts, context lengths
    and block tables of the sequences. `sampled_rows`: ascending indices of the rows whose logits are sampled from. For
    each slice that samples, these are the row of its last token that is not a draft token, and the rows of its draft
    tokens."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    attention: AttentionBatch
    sampled_rows: list[int]


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """Contents of a `Batch` as Python lists, before they become tensors.

    `longs`: the lists of tokens, positions and slots. `shorts`: the lists of query starts, context lengths and block
    numbers; the last consists of the block tables of all sequences, padded to one width and concatenated.
    `num_decodes`: number of slices before the first one of more than one token. `max_rows`: number of tokens of the
    longest slice. `sampled_rows`: see `Batch`."""

    longs: tuple[list[int], ...]
    shorts: tuple[list[int], ...]
    num_decodes: int
    max_rows: int
    sampled_rows: list[int]

    def has_shape_of(self, batch: Batch) -> bool:
        """Return whether `batch` can hold these contents by filling its tensors again. The caller has checked that the
        lists are as long as the tensors."""
        attention = batch.attention
        return (self.num_decodes, self.max_rows, self.sampled_rows) == (
            attention.num_decodes,
            attention.max_rows,
            batch.sampled_rows,
        )

    def batch(self, longs: Sequence[torch.Tensor], shorts: Sequence[torch.Tensor]) -> Batch:
        """Return these contents as a `Batch`, after the caller has converted the lists to tensors.

        `longs`: the lists of the field `longs` as int64 tensors, in the same order. `shorts`: those of the field
        `shorts` as int32 tensors."""
        tokens, positions, slots = longs
        starts, lens, tables = shorts
        attention = AttentionBatch(starts, lens, tables.view(lens.shape[0], -1), self.num_decodes, self.max_rows)
        return Batch(tokens, positions, slots, attention, self.sampled_rows)


def build_batch_arrays(
    slices: Sequence[ScheduledSlice], tokens: Sequence[Sequence[int]], block_size: int
) -> BatchArrays:
    """Return the contents of a batch that consists of `slices`, of which there is at least one.

    `tokens[i]`: the token ids of `slices[i]`. A chained slice continues from a token that the previous step samples;
    its id in `tokens` is that token's, or a placeholder if the id is filled in later. `block_size`: tokens per block.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled_rows: list[int] = []
    starts = [0]
    for piece, slice_tokens in zip(slices, tokens, strict=True):
        slice_positions = range(piece.start, piece.stop)
        ids += slice_tokens
        positions += slice_positions
        slots += [
            piece.blocks[position // block_size] * block_size + position % block_size for position in slice_positions
        ]
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


class BatchBuilder:
    """Build the inputs of forward passes in host memory from slices and their token ids.

    A batch is filled again and returned again while only the numbers in its tensors change, as in consecutive decode
    steps: after a forward pass has evicted the CPU caches, making and dividing new tensors takes 0.1 ms. So a batch is
    valid until the next call of `build`. `block_size`: tokens per KV block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._longs = _Parts((), np.int64)
        self._shorts = _Parts((), np.int32)
        self._batch: Batch | None = None

    def build(self, slices: Sequence[ScheduledSlice], tokens: Sequence[Sequence[int]]) -> Batch:
        """Return the batch of `slices`; the arguments are those of `build_batch_arrays`."""
        numbers = build_batch_arrays(slices, tokens, self._block_size)
        longs, shorts = self._longs.filled(numbers.longs), self._shorts.filled(numbers.shorts)
        last = self._batch
        if last is None or longs is not self._longs or shorts is not self._shorts or not numbers.has_shape_of(last):
            self._longs, self._shorts = longs, shorts
            last = self._batch = numbers.batch(longs.tensors, shorts.tensors)
        return last


class _Parts:
    """Tensors of the given lengths that are views of one array."""

    def __init__(self, lens: tuple[int, ...], dtype: type[np.int64 | np.int32]) -> None:
        self._lens = lens
        self._dtype = dtype
        stops = [*accumulate(lens, initial=0)]
        self._array = np.empty(stops[-1], dtype)
        whole = torch.from_numpy(self._array)
        self.tensors = [whole[start:stop] for start, stop in pairwise(stops)]

    def filled(self, parts: Sequence[list[int]]) -> _Parts:
        """Return tensors that hold these lists: the same ones if the lengths fit."""
        lens = tuple(map(len, parts))
        target = self if lens == self._lens else _Parts(lens, self._dtype)
        numbers: list[int] = []
        for part in parts:
            numbers += part
        target._array[:] = numbers
        return target


def build_batch(slices: Sequence[ScheduledSlice], tokens: Sequence[Sequence[int]], block_size: int) -> Batch:
    """Build the inputs of one forward pass in host memory from slices and their token ids.

    Arguments as for `build_batch_arrays`."""
    return BatchBuilder(block_size).build(slices, tokens)


def _tables(slices: Sequence[ScheduledSlice], stops: Sequence[int], block_size: int) -> list[int]:
    """Concatenate the block tables, all padded to one width with their own first block."""
    width = -(-max(stops) // block_size)
    tables: list[int] = []
    for piece, stop in zip(slices, stops, strict=True):
        needed = -(-stop // block_size)
        tables += piece.blocks[:needed]
        tables += piece.blocks[:1] * (width - needed)
    return tables
