"""Steps that only decode, captured once per batch size and replayed: a decode step is many short kernels, and to begin
each from Python takes longer than it runs; never captures or replays anything else.

Batches are padded to a ladder of sizes. A row that only pads has no slot and no context: nothing is written for it, and
what comes of it is not looked at. All graphs read one set of inputs and share one pool of memory, the largest captured
first, so that together they need what that one needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from tandem.runtime.device_stream import DeviceStream
from tandem.runtime.input_batch import Batch
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.model_config import DecoderConfig
from tandem.runtime.models.causal import CausalModel
from tandem_kernels.contract import AttentionBatch

SMALL_SIZES = (1, 2, 4)
STRIDE = 8
LARGEST = 512
"""Sequences. Beyond it a step computes for long enough that beginning its kernels one by one costs little."""


def ladder(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to be captured, rising: 1, 2, 4, then every eighth; the last holds `max_num_seqs`, or `LARGEST`."""
    largest = min(max_num_seqs, LARGEST)
    sizes = (*SMALL_SIZES, *range(STRIDE, largest, STRIDE))
    return (*(size for size in sizes if size < largest), largest)


class GraphedModel:
    """A `runtime.models.causal.CausalModel` that computes what `model` does, for one cache. Hidden rows of a replayed
    step are valid until the next step. Tables of up to `max_blocks` blocks."""

    def __init__(
        self, model: CausalModel, cache: KVCache, stream: DeviceStream, sizes: Sequence[int], max_blocks: int
    ) -> None:
        """Captures a graph for each of `sizes`, which rise; the cache's content is left alone."""
        self._model = model
        self._cache = cache
        self._sizes = tuple(sizes)
        self._hidden: dict[int, torch.Tensor] = {}
        with stream.running(), torch.inference_mode():
            self._inputs = _inputs(self._sizes[-1], max_blocks, stream.device)
            self._replays = {size: self._capture(stream, size) for size in reversed(self._sizes)}

    @property
    def config(self) -> DecoderConfig:
        return self._model.config

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """As the model's."""
        count = batch.attention.num_sequences
        if batch.attention.num_decodes < count or count > self._sizes[-1] or cache is not self._cache:
            return self._model.forward(batch, cache)
        size = self._sizes[bisect_left(self._sizes, count)]
        self._fill(batch, count, size)
        self._replays[size]()
        return self._hidden[size][:count]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the model's."""
        return self._model.logits(hidden)

    def _fill(self, batch: Batch, count: int, size: int) -> None:
        """Tokens, positions and tables of rows that pad stay what they were: valid, and read for nothing."""
        inputs, width = self._inputs, batch.attention.block_tables.shape[1]
        inputs.tokens[:count].copy_(batch.tokens)
        inputs.positions[:count].copy_(batch.positions)
        inputs.slots[:count].copy_(batch.slots)
        inputs.attention.context_lens[:count].copy_(batch.attention.context_lens)
        inputs.attention.block_tables[:count, :width].copy_(batch.attention.block_tables)
        if count < size:
            inputs.slots[count:size].fill_(-1)
            inputs.attention.context_lens[count:size].zero_()

    def _capture(self, stream: DeviceStream, size: int) -> Callable[[], None]:
        part = _first(self._inputs, size)

        def compute() -> None:
            self._hidden[size] = self._model.forward(part, self._cache)

        return stream.capture(compute)

    def __repr__(self) -> str:
        return f"GraphedModel({self._model!r}, up to {self._sizes[-1]} sequences)"


def _inputs(size: int, max_blocks: int, device: torch.device) -> Batch:
    """Rows that all pad: token 0 at position 0, without a slot."""
    return Batch(
        tokens=torch.zeros(size, dtype=torch.int64, device=device),
        positions=torch.zeros(size, dtype=torch.int64, device=device),
        slots=torch.full((size,), -1, dtype=torch.int64, device=device),
        attention=AttentionBatch(
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
            context_lens=torch.zeros(size, dtype=torch.int32, device=device),
            block_tables=torch.zeros((size, max_blocks), dtype=torch.int32, device=device),
            num_decodes=size,
            max_rows=1,
        ),
        sampled_rows=[],
    )


def _first(batch: Batch, size: int) -> Batch:
    """The first `size` sequences of a batch of decodes, in the same memory."""
    attention = batch.attention
    return Batch(
        tokens=batch.tokens[:size],
        positions=batch.positions[:size],
        slots=batch.slots[:size],
        attention=AttentionBatch(
            query_starts=attention.query_starts[: size + 1],
            context_lens=attention.context_lens[:size],
            block_tables=attention.block_tables[:size],
            num_decodes=size,
            max_rows=1,
        ),
        sampled_rows=[],
    )
