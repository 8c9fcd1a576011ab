"""What the first of an executor's ranks has the others do, and what they tell it; sends and does nothing itself.

Numbers that a device already has are not among them: those the ranks exchange directly, see `Forward` and `Logits`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind
from tandem.core.ids import BlockId, WorkerRef
from tandem.engine.ports import DeviceLost, TransportPeer
from tandem.kv.host_offload import Offload, Onload


class RanksLost(DeviceLost):
    """Ranks that compute one model no longer agree on what was computed, or one of them is gone."""


@dataclass(frozen=True, slots=True)
class SpillBlocks:
    copies: tuple[Offload, ...]


@dataclass(frozen=True, slots=True)
class FillBlocks:
    copies: tuple[Onload, ...]


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """(from, to)."""

    copies: tuple[tuple[BlockId, BlockId], ...]


@dataclass(frozen=True, slots=True)
class ClearBlocks:
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class DigestBlocks:
    """Digests of each rank's heads of so many blocks are gathered; which ones, and their places in their prompts, are
    broadcast."""

    num_blocks: int


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
class OpenMover:
    """Open that agent, as one of this life of a worker. Answered by Readable."""

    worker: WorkerRef


AgentCommand = MoverBytes | OpenMover
"""Carried out beside the others."""


@dataclass(frozen=True, slots=True)
class RankReady:
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


@dataclass(frozen=True, slots=True)
class RankRegistered:
    """How a rank's part of the KV is read: a peer of one rank."""

    peer: TransportPeer


RankEvent = RankReady | Loaded | RankRegistered | RankFailed | MoverBytes
