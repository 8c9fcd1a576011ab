"""What an executor needs of a model; owns no implementation."""

from __future__ import annotations

from typing import Protocol

import torch

from tandem.runtime.cache import KVCache
from tandem.runtime.model_config import DecoderConfig
from tandem_kernels.contract import AttentionBatch


class CausalModel(Protocol):
    """A causal language model over paged KV; holds weights, never KV."""

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: AttentionBatch,
        cache: KVCache,
    ) -> torch.Tensor:
        """Computes and stores the KV of `tokens` `[T]` (int64, as `positions` and `slots`), whose earlier context is in
        `cache`. Yields the hidden rows before the final norm, `[T, hidden]`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits `[rows, vocab]` of rows of `forward`; the next call may write over them."""
        ...
