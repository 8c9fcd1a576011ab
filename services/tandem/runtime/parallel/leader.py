"""The first rank's model and cache, which have the other ranks do their share of each call; an executor sees no ranks.

A call tells the others what is coming and then takes part in it. From there on a failure, of whatever kind, leaves
ranks that may not have done the same, and would show in wrong tokens: it ends them all, as RanksLost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tandem.core.ids import BlockId
from tandem.engine.ranks import (
    ClearBlocks,
    CopyBlocks,
    DigestBlocks,
    FillBlocks,
    Logits,
    RankCommand,
    RanksLost,
    SpillBlocks,
)
from tandem.kv.host_pool import Fill, Spill
from tandem.runtime.batch import Batch
from tandem.runtime.cache import KVCache, unsigned
from tandem.runtime.model_config import DecoderConfig
from tandem.runtime.models.causal import CausalModel
from tandem.runtime.parallel.communicator import Communicator
from tandem.runtime.parallel.packed_batch import pack, shape_of

Tell = Callable[[RankCommand], None]
"""Have every other rank carry a command out, after all that it was told before. Does not wait for it; raises when a
rank is gone."""


class Lead:
    """The way from the first rank to the others. One thread."""

    def __init__(self, tell: Tell, communicator: Communicator) -> None:
        self._tell = tell
        self.communicator = communicator

    @contextmanager
    def together(self, command: RankCommand) -> Iterator[None]:
        """What is done inside is this rank's part of the command. Raises RanksLost for whatever goes wrong."""
        try:
            self._tell(command)
            yield
        except RanksLost:
            raise
        except Exception as failure:
            raise RanksLost(f"{type(command).__name__}: {type(failure).__name__}: {failure}") from failure


class RankedModel:
    """A `runtime.models.causal.CausalModel`; `local` is the first rank's part of it. Raises RanksLost."""

    def __init__(self, local: CausalModel, lead: Lead) -> None:
        self._local = local
        self._lead = lead

    @property
    def config(self) -> DecoderConfig:
        return self._local.config

    @property
    def dtype(self) -> torch.dtype:
        return self._local.dtype

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        numbers = pack(batch)
        with self._lead.together(shape_of(batch)):
            self._lead.communicator.broadcast(numbers)
            return self._local.forward(batch, cache)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._lead.together(Logits(len(hidden))):
            return self._local.logits(hidden)

    def __repr__(self) -> str:
        return f"RankedModel({self._local!r})"


class RankedCache(KVCache):
    """The first rank's part of the pool. What is done to blocks is done to every rank's part of them; `digest` is of
    all heads, that of `KVCache` of this rank's. Raises RanksLost."""

    def __init__(self, lead: Lead, *pool: Any, **options: Any) -> None:
        """All but `lead` as `KVCache` takes it."""
        super().__init__(*pool, **options)
        self._lead = lead

    def clear(self, blocks: Sequence[BlockId]) -> None:
        if blocks:
            with self._lead.together(ClearBlocks(tuple(blocks))):
                super().clear(blocks)

    def copy(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        if copies:
            with self._lead.together(CopyBlocks(tuple(copies))):
                super().copy(copies)

    def spill(self, copies: Sequence[Spill]) -> None:
        if copies:
            with self._lead.together(SpillBlocks(tuple(copies))):
                super().spill(copies)

    def fill(self, copies: Sequence[Fill]) -> None:
        if copies:
            with self._lead.together(FillBlocks(tuple(copies))):
                super().fill(copies)

    def digest(self, blocks: Sequence[BlockId], indices: Sequence[int]) -> list[tuple[int, ...]]:
        with self._lead.together(DigestBlocks(tuple(blocks), tuple(indices))):
            parts = self._lead.communicator.gather(self.digest_words(blocks, indices))
            assert parts is not None, "the first rank leads"
            return unsigned(torch.cat(parts, 1))
