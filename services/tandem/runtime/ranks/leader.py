"""Run the first rank's model and cache so that each call is executed on all ranks; an executor does not see the ranks.

A call first sends its command to the other ranks and then executes the first rank's part. Any failure after the command
was sent leaves ranks in different states, which would give wrong tokens; it is raised as RanksLost, which ends all
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tandem.core.ids import BlockId
from tandem.engine.rank_messages import ClearBlocks, CopyBlocks, DigestBlocks, Logits
from tandem.kv.host_offload import Offload, Onload
from tandem.runtime.input_batch import Batch
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.models.causal import CausalModel
from tandem.runtime.ranks.packed_batch import pack, shape_of
from tandem.runtime.ranks.rank_context import RankContext


class RankedModel:
    """Model that runs on all ranks: each call is sent to the other ranks and executed here on `local`.

    `local` is the first rank's part of the model. Implements `runtime.models.causal.CausalModel`. Methods raise
    RanksLost when any rank fails."""

    def __init__(self, local: CausalModel, rank_context: RankContext) -> None:
        self.config = local.config
        self.dtype = local.dtype
        self._local = local
        self._rank_context = rank_context

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        numbers = pack(batch)
        with self._rank_context.run_on_all(shape_of(batch)):
            self._rank_context.communicator.broadcast(numbers)
            return self._local.forward(batch, cache)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._rank_context.run_on_all(Logits(len(hidden))):
            return self._local.logits(hidden)

    def expert_tokens(self) -> Mapping[int, Sequence[int]]:
        """Return how many tokens each expert of the whole model has computed, as the first rank counted them.

        Every rank routes all tokens, so the other ranks need not be asked. See `CausalModel.expert_tokens`."""
        return self._local.expert_tokens()

    def __repr__(self) -> str:
        return f"RankedModel({self._local!r})"


class RankedCache(KVCache):
    """First rank's part of the KV pool, whose operations are executed on the parts of all ranks.

    These are `clear`, `copy`, `digest` and `digest_on_device`; the last two return digests of the KV heads of all
    ranks. Methods raise RanksLost when any rank fails."""

    def __init__(self, rank_context: RankContext, *pool: Any, **options: Any) -> None:
        """Allocate this rank's part; the arguments behind `rank_context` are those of `KVCache`."""
        super().__init__(*pool, **options)
        self._rank_context = rank_context

    def clear(self, blocks: Sequence[BlockId]) -> None:
        if blocks:
            with self._rank_context.run_on_all(ClearBlocks(tuple(blocks))):
                super().clear(blocks)

    def copy(
        self, spills: Sequence[Offload], fills: Sequence[Onload], copies: Sequence[tuple[BlockId, BlockId]]
    ) -> None:
        if spills or fills or copies:
            with self._rank_context.run_on_all(CopyBlocks(tuple(spills), tuple(fills), tuple(copies))):
                super().copy(spills, fills, copies)

    def digest_on_device(self, blocks: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        places = torch.stack((blocks, indices))
        with self._rank_context.run_on_all(DigestBlocks(len(blocks))):
            self._rank_context.communicator.broadcast(places)
            parts = self._rank_context.communicator.gather(self.digest_own_on_device(blocks, indices))
            assert parts is not None, "the first rank leads"
            return torch.cat(parts, 1)
