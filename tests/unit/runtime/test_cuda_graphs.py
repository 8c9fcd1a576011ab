"""Test that padding a step to a captured size changes no row and writes no KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.core.ids import BlockId, SeqId
from tandem.kv.layout import KVGroup, KVLayout
from tandem.runtime.checkpoint import Checkpoint
from tandem.runtime.cuda_graphs import GraphedModel, ladder
from tandem.runtime.device_stream import DeviceStream
from tandem.runtime.input_batch import Batch, build_batch
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.model_config import read_model_config
from tandem.runtime.models.decoder import Decoder
from tandem.sched.state.step_plan import ScheduledSlice

_CONTEXT = 9
_LAYOUT = KVLayout(4, (KVGroup(2, 2, 8, "float64"),))


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (33, (1, 2, 4, 8, 16, 24, 32, 33)),
        (64, (1, 2, 4, *range(8, 65, 8))),
    ],
)
def test_the_ladder_ends_where_batches_do(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert ladder(max_num_seqs) == sizes


def test_the_ladder_has_an_end() -> None:
    assert ladder(100_000)[-1] == 512 and ladder(100_000) == ladder(512)


class Counting(DeviceStream):
    """A double of graph capture that replays by calling, and records captures and replays."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed: list[int] = []

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        number, self.captured = self.captured, self.captured + 1

        def replay() -> None:
            self.replayed.append(number)
            work()

        return replay


@pytest.fixture
def decoder(model_dir: Path) -> Decoder:
    with Checkpoint(model_dir, torch.float64) as checkpoint:
        return Decoder(read_model_config(model_dir), checkpoint)


def _cache(num_seqs: int) -> KVCache:
    cache = KVCache(_LAYOUT, num_seqs * 4)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def _decodes(count: int) -> Batch:
    """Return decodes of one row each, with contexts of several lengths, in blocks from the pool's end on."""
    pieces = []
    for i in range(count):
        start = _CONTEXT + i % 4
        blocks = tuple(BlockId(4 * (count - 1 - i) + j) for j in range(-(-(start + 1) // 4)))
        pieces.append(ScheduledSlice(SeqId(i), start, 1, (i % 50,), blocks, None))
    return build_batch(pieces, [piece.tokens for piece in pieces], 4)


def size_of(count: int) -> int:
    return min((size for size in ladder(32) if size >= count), default=count)


@pytest.mark.slow
def test_rows_are_the_same_padded_or_not_for_every_batch_size(decoder: Decoder) -> None:
    """Sizes go down from the largest and up again, so a smaller step runs on buffers with values of a larger one."""
    stream, cache = Counting(), _cache(33)
    graphed = GraphedModel(decoder, cache, stream, ladder(32), max_blocks=6)
    assert stream.captured == len(ladder(32))
    for count in (*range(33, 0, -1), *range(1, 34)):
        batch, plain = _decodes(count), _cache(33)
        cache.pool.copy_(plain.pool)
        right = decoder.forward(batch, plain)
        torch.testing.assert_close(graphed.forward(batch, cache), right, rtol=1e-12, atol=1e-12)
        assert torch.allclose(cache.pool, plain.pool, rtol=1e-12, atol=1e-12), "a row that pads was written"
        torch.testing.assert_close(graphed.logits(right), decoder.logits(right))
        assert not graphed._inputs.attention.context_lens[count : size_of(count)].any(), (
            "rows that pad attend to nothing"
        )
    # Largest first: of n sizes the i-th is captured as number n - 1 - i. One batch was too large.
    sizes = ladder(32)
    used = [sizes[len(sizes) - 1 - number] for number in stream.replayed]
    assert used == [size_of(count) for count in (*range(32, 0, -1), *range(1, 33))]


def test_a_step_with_a_chunk_is_not_replayed(decoder: Decoder) -> None:
    stream, cache = Counting(), _cache(4)
    graphed = GraphedModel(decoder, cache, stream, ladder(4), max_blocks=4)
    pieces = [
        ScheduledSlice(SeqId(0), 0, 1, (3,), (BlockId(0),), None),
        ScheduledSlice(SeqId(1), 0, 2, (3, 4), (BlockId(4),), None),
    ]
    batch = build_batch(pieces, [piece.tokens for piece in pieces], 4)
    plain = _cache(4)
    torch.testing.assert_close(graphed.forward(batch, cache), decoder.forward(batch, plain))
    assert stream.replayed == [] and torch.equal(cache.pool, plain.pool)


def test_another_cache_is_not_the_graphs_own(decoder: Decoder) -> None:
    stream, cache, other = Counting(), _cache(2), _cache(2)
    graphed = GraphedModel(decoder, cache, stream, ladder(2), max_blocks=4)
    graphed.forward(_decodes(2), other)
    assert stream.replayed == [] and not torch.equal(other.pool, cache.pool)
