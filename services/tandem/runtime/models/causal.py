"""What an executor needs of a model; owns no implementation."""

from __future__ import annotations

from typing import Protocol

import torch

from tandem.runtime.input_batch import Batch
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.model_config import DecoderConfig


class CausalModel(Protocol):
    """A causal language model over paged KV; holds weights, never KV."""

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Computes and stores the KV of a batch whose earlier context is in `cache`. Yields the hidden rows before the
        final norm, `[T, hidden]`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits `[rows, vocab]` of rows of `forward`; the next call may write over them."""
        ...
