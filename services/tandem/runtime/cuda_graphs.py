"""Capture decode-only steps as CUDA graphs, one per batch size, and replay them.

A decode step is many short kernels, and launching each from Python takes longer than running it. Batches are padded to
a ladder of sizes. A padding row has no slot and no context: nothing is written for it, and its result is ignored. All
graphs read one set of inputs and share one memory pool; the largest is captured first, so that all together need no
more memory than the largest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import torch

from tandem.runtime.device_stream import DeviceStream
from tandem.runtime.input_batch import Batch
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.models.causal import CausalModel
from tandem_kernels.contract import AttentionBatch

SMALL_SIZES = (1, 2, 4)
STRIDE = 8
LARGEST = 512
"""Largest number of sequences in a graph. A larger step computes for so long that launching its kernels one by one
costs little."""


def ladder(max_num_seqs: int) -> tuple[int, ...]:
    """List the batch sizes to capture as CUDA graphs, ascending: 1, 2, 4, multiples of 8, and the largest.

    Sizes count sequences. The largest is `max_num_seqs`, but at most `LARGEST`."""
    largest = min(max_num_seqs, LARGEST)
    sizes = (*SMALL_SIZES, *range(STRIDE, largest, STRIDE))
    return (*(size for size in sizes if size < largest), largest)


class GraphedModel:
    """Model that replays CUDA graphs of `model` for batches in which every sequence decodes one token.

    Implements `runtime.models.causal.CausalModel`. `cache`: the KV cache that the graphs read and write. `sizes`:
    numbers of sequences for which a graph is captured, ascending; a batch is padded to the next of them. `max_blocks`:
    most blocks of one sequence, the width of the graphs' block tables. Batches with a sequence of several tokens, with
    more sequences than the largest size, or on another cache are run on `model` without a graph. The hidden rows of a
    replayed batch are overwritten by the next `forward`."""

    def __init__(
        self, model: CausalModel, cache: KVCache, stream: DeviceStream, sizes: Sequence[int], max_blocks: int
    ) -> None:
        """Capture a graph for each of `sizes`, given in ascending order; the cache's content does not change."""
        self.config = model.config
        self.dtype = model.dtype
        self._model = model
        self._cache = cache
        self._sizes = tuple(sizes)
        self._hidden: dict[int, torch.Tensor] = {}
        with stream.running(), torch.inference_mode():
            self._inputs = _inputs(self._sizes[-1], max_blocks, stream.device)
            self._replays = {size: self._capture(stream, size) for size in reversed(self._sizes)}

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Compute hidden rows as `CausalModel.forward` does; replays a graph if all sequences of the batch decode."""
        count = batch.attention.num_sequences
        if batch.attention.num_decodes < count or count > self._sizes[-1] or cache is not self._cache:
            return self._model.forward(batch, cache)
        size = self._sizes[bisect_left(self._sizes, count)]
        self._fill(batch, count, size)
        self._replays[size]()
        return self._hidden[size][:count]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits as `CausalModel.logits` does, always without a graph."""
        return self._model.logits(hidden)

    def expert_tokens(self) -> Mapping[int, Sequence[int]]:
        """Return how many tokens each expert has computed, without padding rows. See `CausalModel.expert_tokens`."""
        return self._model.expert_tokens()

    def _fill(self, batch: Batch, count: int, size: int) -> None:
        """Copy a batch of `count` sequences into the graphs' inputs and pad it to `size`.

        Tokens, positions and tables of padding rows keep their old values, which are valid and have no effect."""
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
    """Allocate inputs for `size` sequences, all padding: token 0 at position 0, without a slot."""
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
    """Return views of the first `size` sequences of a decode-only batch."""
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
