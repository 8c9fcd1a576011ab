"""Define the interface through which an executor runs a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from tandem.runtime.architectures.spec import DecoderSpec
from tandem.runtime.input_batch import Batch
from tandem.runtime.kv_cache import KVCache


class CausalModel(Protocol):
    """Causal language model over paged KV: it holds the weights, and the caller passes the KV cache to each call."""

    @property
    def config(self) -> DecoderSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Run the layers over a batch and return the hidden rows before the final norm, `[T, hidden]`.

        Attention reads the sequences' earlier KV from `cache`; the KV of the batch's T rows is written there."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return next-token logits `[rows, vocab]` of hidden rows that `forward` returned.

        The next call may overwrite the result."""
        ...

    def expert_tokens(self) -> Mapping[int, Sequence[int]]:
        """Return how many tokens each expert has computed so far.

        The result maps the index of each layer with experts to a list `[experts]` of counts. Experts are numbered as in
        the whole model, also on a rank that holds only some of them. May be called on any thread, without waiting for a
        running step. Raises RuntimeError when the device has failed."""
        ...
