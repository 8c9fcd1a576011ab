"""Define the interface through which an executor runs a model."""

from __future__ import annotations

from typing import Protocol

import torch

from tandem.runtime.input_batch import Batch
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.model_config import DecoderConfig


class CausalModel(Protocol):
    """Causal language model over paged KV; it holds weights, and the caller passes the KV cache."""

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Compute a batch whose earlier context is in `cache`, and store its KV there.

        Returns the hidden rows before the final norm, `[T, hidden]`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return next-token logits `[rows, vocab]` of rows from `forward`; the next call may overwrite them."""
        ...
