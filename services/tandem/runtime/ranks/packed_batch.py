"""Pack a batch into one tensor that can be broadcast to other ranks without reading it on the host, and unpack it.

`sampled_rows` is left out because only the first rank samples.
"""

from __future__ import annotations

import torch

from tandem.engine.rank_messages import Forward
from tandem.runtime.input_batch import Batch
from tandem_kernels.contract import AttentionBatch


def shape_of(batch: Batch) -> Forward:
    """Return the sizes that another rank needs to unpack `batch`, as the `Forward` command that announces the batch to
    it.

    They are read from tensor shapes, without waiting for the device."""
    attention = batch.attention
    return Forward(
        num_rows=len(batch.tokens),
        num_sequences=attention.num_sequences,
        num_blocks=attention.block_tables.shape[1],
        num_decodes=attention.num_decodes,
        max_rows=attention.max_rows,
    )


def num_packed(shape: Forward) -> int:
    """Return the number of elements of the tensor that `pack` builds for a batch of this shape."""
    return 3 * shape.num_rows + 1 + shape.num_sequences * (2 + shape.num_blocks)


def pack(batch: Batch) -> torch.Tensor:
    """Return all inputs of a batch concatenated in one int64 tensor, for a broadcast to other ranks.

    The order is tokens, positions, slots, query starts, context lengths, block tables."""
    attention = batch.attention
    sequences = (attention.query_starts, attention.context_lens, attention.block_tables.flatten())
    return torch.cat((batch.tokens, batch.positions, batch.slots, *(part.to(torch.int64) for part in sequences)))


def unpack(numbers: torch.Tensor, shape: Forward) -> Batch:
    """Return the batch that `pack` packed into `numbers`; its `sampled_rows` is empty.

    `shape`: the sizes of that batch, from `shape_of`."""
    rows, sequences = shape.num_rows, shape.num_sequences
    sizes = [rows, rows, rows, sequences + 1, sequences, sequences * shape.num_blocks]
    tokens, positions, slots, starts, lens, tables = torch.split(numbers, sizes)
    return Batch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        attention=AttentionBatch(
            query_starts=starts.to(torch.int32),
            context_lens=lens.to(torch.int32),
            block_tables=tables.to(torch.int32).view(sequences, shape.num_blocks),
            num_decodes=shape.num_decodes,
            max_rows=shape.max_rows,
        ),
        sampled_rows=[],
    )
