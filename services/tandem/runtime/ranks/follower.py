"""Execute the first rank's commands, in order, on a tensor-parallel rank other than the first."""

from __future__ import annotations

import torch

from tandem.engine.rank_messages import ClearBlocks, CopyBlocks, DigestBlocks, Forward, Logits, RankCommand
from tandem.runtime.device_stream import DeviceStream
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.models.causal import CausalModel
from tandem.runtime.parallel.communicator import Communicator
from tandem.runtime.ranks.packed_batch import num_packed, unpack


class Follower:
    """Executes the first rank's commands on another rank, with that rank's part of the model and of the KV pool.

    `stream`: the device stream that commands run on, by default the CPU's. To be used from one thread."""

    def __init__(
        self, model: CausalModel, cache: KVCache, communicator: Communicator, stream: DeviceStream | None = None
    ) -> None:
        self.model = model
        self.cache = cache
        self.communicator = communicator
        self._stream = stream or DeviceStream()

    def carry_out(self, command: RankCommand) -> None:
        """Execute one command of the first rank, and take part in the command's collectives.

        If it raises, the command may be half done, so the first rank must stop too."""
        with self._stream.running():
            self._carry_out(command)

    def _carry_out(self, command: RankCommand) -> None:
        match command:
            case ClearBlocks(blocks):
                self.cache.clear(blocks)
            case CopyBlocks(spills, fills, copies):
                self.cache.copy(spills, fills, copies)
            case DigestBlocks(num_blocks):
                self._digest(num_blocks)
            case Forward():
                self._forward(command)
            case Logits(num_rows):
                self._logits(num_rows)

    def _forward(self, shape: Forward) -> None:
        numbers = torch.empty(num_packed(shape), dtype=torch.int64, device=self.cache.pool.device)
        self.model.forward(unpack(self.communicator.broadcast(numbers), shape), self.cache)

    def _digest(self, num_blocks: int) -> None:
        places = torch.empty((2, num_blocks), dtype=torch.int64, device=self.cache.pool.device)
        blocks, indices = self.communicator.broadcast(places)
        self.communicator.gather(self.cache.digest_own_on_device(blocks, indices))

    def _logits(self, num_rows: int) -> None:
        """Compute this rank's part of the logits of `num_rows` rows.

        The model receives the rows by broadcast, because only the leader knows which rows are sampled from."""
        shape = (num_rows, self.model.config.hidden_size)
        self.model.logits(torch.empty(shape, dtype=self.model.dtype, device=self.cache.pool.device))

    def __repr__(self) -> str:
        return f"Follower({self.model!r}, {self.cache!r})"
