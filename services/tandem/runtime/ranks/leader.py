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
from tandem.engine.rank_messages import (
    ClearBlocks,
    CopyBlocks,
    DigestBlocks,
    FillBlocks,
    Logits,
    RankCommand,
    RanksLost,
    SpillBlocks,
)
from tandem.kv.host_offload import Offload, Onload
from tandem.runtime.input_batch import Batch
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.model_config import DecoderConfig
from tandem.runtime.models.causal import CausalModel
from tandem.runtime.parallel.communicator import Communicator
from tandem.runtime.ranks.packed_batch import pack, shape_of

Tell = Callable[[RankCommand], None]
"""Have every other rank carry a command out, after all that it was told before. Does not wait for it; raises when a
rank is gone."""


class FollowerCommands:
    """The way from the first rank to the others. One thread."""

    def __init__(self, tell: Tell, communicator: Communicator) -> None:
        self._tell = tell
        self.communicator = communicator

    @contextmanager
    def run_on_all(self, command: RankCommand) -> Iterator[None]:
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

    def __init__(self, local: CausalModel, lead: FollowerCommands) -> None:
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
        with self._lead.run_on_all(shape_of(batch)):
            self._lead.communicator.broadcast(numbers)
            return self._local.forward(batch, cache)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._lead.run_on_all(Logits(len(hidden))):
            return self._local.logits(hidden)

    def __repr__(self) -> str:
        return f"RankedModel({self._local!r})"


class RankedCache(KVCache):
    """The first rank's part of the pool. What is done to blocks is done to every rank's part of them; `digest` and
    `digest_on_device` are of all heads. Raises RanksLost."""

    def __init__(self, lead: FollowerCommands, *pool: Any, **options: Any) -> None:
        """All but `lead` as `KVCache` takes it."""
        super().__init__(*pool, **options)
        self._lead = lead

    def clear(self, blocks: Sequence[BlockId]) -> None:
        if blocks:
            with self._lead.run_on_all(ClearBlocks(tuple(blocks))):
                super().clear(blocks)

    def copy(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        if copies:
            with self._lead.run_on_all(CopyBlocks(tuple(copies))):
                super().copy(copies)

    def offload(self, copies: Sequence[Offload]) -> None:
        if copies:
            with self._lead.run_on_all(SpillBlocks(tuple(copies))):
                super().offload(copies)

    def onload(self, copies: Sequence[Onload]) -> None:
        if copies:
            with self._lead.run_on_all(FillBlocks(tuple(copies))):
                super().onload(copies)

    def digest_on_device(self, blocks: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        places = torch.stack((blocks, indices))
        with self._lead.run_on_all(DigestBlocks(len(blocks))):
            self._lead.communicator.broadcast(places)
            parts = self._lead.communicator.gather(self.digest_own_on_device(blocks, indices))
            assert parts is not None, "the first rank leads"
            return torch.cat(parts, 1)
