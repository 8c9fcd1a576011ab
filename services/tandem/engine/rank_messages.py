"""Define the messages between the first rank of a tensor-parallel executor and the other ranks, as frozen values.

Numbers that are already on a device are not part of the messages: the ranks exchange them directly, see `Forward` and
`Logits`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind
from tandem.core.ids import BlockId, WorkerRef
from tandem.engine.ports import DeviceLost
from tandem.engine.transfer_messages import Command, Event, TransportPeer
from tandem.kv.host_offload import Offload, Onload


class RanksLost(DeviceLost):
    """Raised when ranks of one model no longer agree on what was computed, or one of them is gone."""


@dataclass(frozen=True, slots=True)
class SpillBlocks:
    copies: tuple[Offload, ...]


@dataclass(frozen=True, slots=True)
class FillBlocks:
    copies: tuple[Onload, ...]


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy blocks inside the pool: pairs of (from, to)."""

    copies: tuple[tuple[BlockId, BlockId], ...]


@dataclass(frozen=True, slots=True)
class ClearBlocks:
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class DigestBlocks:
    """Compute the digests of `num_blocks` blocks for each rank's heads and gather them; block ids and positions in
    their prompts are broadcast."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the model on a batch whose numbers are broadcast.

    The batch has `num_rows` rows of `num_sequences` sequences, with tables of `num_blocks` blocks each. `num_decodes`,
    `max_rows`: see `tandem_kernels.contract.AttentionBatch`.
    """

    num_rows: int
    num_sequences: int
    num_blocks: int
    num_decodes: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class Logits:
    """Compute the logits of `num_rows` hidden rows, which are broadcast."""

    num_rows: int


RankCommand = SpillBlocks | FillBlocks | CopyBlocks | ClearBlocks | DigestBlocks | Forward | Logits
"""Commands to the model, carried out in order."""


@dataclass(frozen=True, slots=True)
class OpenMover:
    """Open the transfer agent of a rank, for this incarnation of the worker. Answered by RankRegistered."""

    worker: WorkerRef


@dataclass(frozen=True, slots=True)
class HaltMover:
    """Stop the transfer agent of a rank after its open reads. Answered by TransferStopped."""


AgentCommand = OpenMover | HaltMover | Command
"""Commands to the transfer agent, carried out in parallel to the model's commands."""


@dataclass(frozen=True, slots=True)
class RankReady:
    """A rank process has started and is about to connect to the other ranks."""

    rank: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rank has loaded its part of the model, has room for `num_blocks` blocks, and accepts commands."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class RankFailed:
    """The rank process ends because of an error."""

    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class RankRegistered:
    """The rank's pool is registered with its transport; `peer` describes this rank alone."""

    peer: TransportPeer


RankEvent = RankReady | Loaded | RankRegistered | RankFailed | Event
