"""One rank but the first: carries out what it is told, in order; decides nothing and never talks to the leader."""

from __future__ import annotations

import torch

from tandem.engine.ranks import (
    ClearBlocks,
    CopyBlocks,
    DigestBlocks,
    FillBlocks,
    Forward,
    Logits,
    RankCommand,
    SpillBlocks,
)
from tandem.runtime.cache import KVCache
from tandem.runtime.models.causal import CausalModel
from tandem.runtime.parallel.communicator import Communicator
from tandem.runtime.parallel.packed_batch import num_packed, unpack


class Follower:
    """A rank's part of a model and of its KV. One thread."""

    def __init__(self, model: CausalModel, cache: KVCache, communicator: Communicator) -> None:
        self.model = model
        self.cache = cache
        self.communicator = communicator

    def carry_out(self, command: RankCommand) -> None:
        """Whatever it raises, the leader must not go on: this rank may have done less than it was told."""
        match command:
            case ClearBlocks(blocks):
                self.cache.clear(blocks)
            case CopyBlocks(copies):
                self.cache.copy(copies)
            case SpillBlocks(spills):
                self.cache.spill(spills)
            case FillBlocks(fills):
                self.cache.fill(fills)
            case DigestBlocks(blocks, indices):
                self.communicator.gather(self.cache.digest_words(blocks, indices))
            case Forward():
                self._forward(command)
            case Logits(num_rows):
                self._logits(num_rows)

    def _forward(self, shape: Forward) -> None:
        numbers = torch.empty(num_packed(shape), dtype=torch.int64, device=self.cache.pool.device)
        self.model.forward(unpack(self.communicator.broadcast(numbers), shape), self.cache)

    def _logits(self, num_rows: int) -> None:
        """The rows of `forward` would do, but only the leader knows which are drawn from."""
        shape = (num_rows, self.model.config.hidden_size)
        self.model.logits(torch.empty(shape, dtype=self.model.dtype, device=self.cache.pool.device))

    def __repr__(self) -> str:
        return f"Follower({self.model!r}, {self.cache!r})"
