"""What the first of an executor's ranks has the others do, and what they tell it; sends and does nothing itself.

Numbers that a device already has are not among them: those the ranks exchange directly, see `Forward` and `Logits`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind
from tandem.core.ids import BlockId
from tandem.engine.ports import DeviceLost
from tandem.kv.host_pool import Fill, Spill


class RanksLost(DeviceLost):
    """Ranks that compute one model no longer agree on what was computed, or one of them is gone."""


@dataclass(frozen=True, slots=True)
class SpillBlocks:
    copies: tuple[Spill, ...]


@dataclass(frozen=True, slots=True)
class FillBlocks:
    copies: tuple[Fill, ...]


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """(from, to)."""

    copies: tuple[tuple[BlockId, BlockId], ...]


@dataclass(frozen=True, slots=True)
class ClearBlocks:
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class DigestBlocks:
    """Digests of each rank's heads of `blocks`, the `indices`-th of their prompts, are gathered."""

    blocks: tuple[BlockId, ...]
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forward:
    """A batch of `num_rows` rows of `num_sequences` sequences, with tables of `num_blocks` blocks each; its numbers are
    broadcast. `num_decodes` and `max_rows` as in `tandem_kernels.contract.AttentionBatch`."""

    num_rows: int
    num_sequences: int
    num_blocks: int
    num_decodes: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class Logits:
    """Of `num_rows` hidden rows, which are broadcast."""

    num_rows: int


RankCommand = SpillBlocks | FillBlocks | CopyBlocks | ClearBlocks | DigestBlocks | Forward | Logits
"""Carried out in order."""


@dataclass(frozen=True, slots=True)
class MoverBytes:
    """To or from the agent that moves a rank's KV, which alone knows what they mean."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Joining:
    """A rank is there and about to meet the others."""

    rank: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """It has its part of the model and of so many blocks, and takes commands."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class RankFailed:
    """It ends."""

    kind: ErrorKind
    message: str


RankEvent = Joining | Loaded | RankFailed | MoverBytes
