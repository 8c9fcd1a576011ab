"""Test that a batch has the token, the position and the KV slot of each row."""

from __future__ import annotations

import torch

from tandem.core.ids import BlockId, SeqId
from tandem.core.request import SamplingParams
from tandem.runtime.input_batch import BatchBuilder, build_batch
from tandem.sched.state.step_plan import Sampling, ScheduledSlice

SAMPLING = Sampling(SamplingParams(max_tokens=4), choice=0, index=0)


def piece(
    start: int, tokens: tuple[int, ...], blocks: tuple[int, ...], samples: bool, num_drafted: int = 0
) -> ScheduledSlice:
    held = tuple(BlockId(block) for block in blocks)
    sampling = SAMPLING if samples else None
    return ScheduledSlice(SeqId(blocks[0]), start, len(tokens), tokens, held, sampling, num_drafted=num_drafted)


def test_decodes_chunks_and_guesses_share_a_batch() -> None:
    decode = piece(5, (50,), (7, 3), samples=True)
    chunk = piece(2, (61, 62, 63), (1, 2, 9), samples=False)
    guess = piece(8, (70, 71, 72), (4, 5, 6), samples=True, num_drafted=2)
    batch = build_batch([decode, chunk, guess], [(50,), (61, 62, 63), (70, 71, 72)], block_size=4)

    assert batch.tokens.tolist() == [50, 61, 62, 63, 70, 71, 72]
    assert batch.positions.tolist() == [5, 2, 3, 4, 8, 9, 10]
    assert batch.slots.tolist() == [13, 6, 7, 8, 24, 25, 26]
    assert batch.sampled_rows == [0, 4, 5, 6]
    assert batch.attention.query_starts.tolist() == [0, 1, 4, 7]
    assert batch.attention.context_lens.tolist() == [6, 5, 11]
    # Tables are as wide as the longest context needs; shorter ones go on with their first block.
    assert batch.attention.block_tables.tolist() == [[7, 3, 7], [1, 2, 1], [4, 5, 6]]


def test_every_tensor_is_what_kernels_read() -> None:
    batch = build_batch([piece(0, (5, 6), (0,), samples=False), piece(3, (7,), (1,), samples=True)], [(5, 6), (7,)], 4)
    attention = batch.attention
    longs, ints = (
        (batch.tokens, batch.positions, batch.slots),
        (attention.query_starts, attention.context_lens, attention.block_tables),
    )
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in longs)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in ints)


def test_consecutive_decodes_share_memory_and_other_batches_do_not() -> None:
    builder = BatchBuilder(4)
    first = builder.build([piece(5, (50,), (7, 3), samples=True)], [(50,)])
    second = builder.build([piece(6, (51,), (7, 3), samples=True)], [(51,)])
    assert second.tokens.data_ptr() == first.tokens.data_ptr()
    assert (second.tokens.tolist(), second.positions.tolist(), second.slots.tolist()) == ([51], [6], [14])
    assert second.attention.context_lens.tolist() == [7]
    longer = builder.build([piece(8, (52,), (7, 3, 9), samples=True)], [(52,)])
    assert (longer.slots.tolist(), longer.attention.block_tables.tolist()) == ([36], [[7, 3, 9]])
    two = builder.build([piece(9, (53, 54), (7, 3, 9), samples=True)], [(53, 54)])
    assert (two.tokens.tolist(), two.positions.tolist(), two.sampled_rows) == ([53, 54], [9, 10], [1])


def test_a_batch_is_returned_again_only_while_its_numbers_alone_change() -> None:
    builder = BatchBuilder(4)
    one = [piece(5, (50,), (7, 3), samples=True), piece(1, (60,), (2,), samples=False)]
    first = builder.build(one, [(50,), (60,)])
    assert builder.build(one, [(51,), (61,)]) is first and first.tokens.tolist() == [51, 61]
    both = [piece(5, (50,), (7, 3), samples=True), piece(1, (60,), (2,), samples=True)]
    second = builder.build(both, [(50,), (60,)])
    assert second is not first and second.sampled_rows == [0, 1]
    short, long = piece(5, (50,), (7, 3), samples=True), piece(0, (60, 61), (2,), samples=True)
    num_decodes = [
        builder.build(order, [piece.tokens for piece in order]).attention.num_decodes
        for order in ([short, long], [long, short])
    ]
    assert num_decodes == [1, 0]
