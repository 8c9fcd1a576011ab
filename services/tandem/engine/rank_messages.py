"""Define the messages between the first rank of a tensor-parallel executor and the other ranks, as frozen values.

A rank begins with RankReady, which the first rank answers by StartJoining once all ranks are ready, or by RankRefused.
Numbers that are already on a device are not part of the messages: the ranks exchange them directly, see `Forward` and
`Logits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.core.errors import ErrorKind
from tandem.core.ids import BlockId, WorkerRef
from tandem.engine.ports import DeviceLost
from tandem.engine.transfer_messages import Command, Event, TransportPeer
from tandem.kv.host_offload import Offload, Onload


class RanksLost(DeviceLost):
    """Raised when the ranks of one model have diverged in what they computed, or when a rank is gone."""


@dataclass(frozen=True, slots=True)
class SpillBlocks:
    """Copy blocks from the pool to host memory: pairs of (block, host slot)."""

    copies: tuple[Offload, ...]


@dataclass(frozen=True, slots=True)
class FillBlocks:
    """Copy blocks from host memory back to the pool: pairs of (host slot, block)."""

    copies: tuple[Onload, ...]


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy blocks inside the pool: pairs of (source, target)."""

    copies: tuple[tuple[BlockId, BlockId], ...]


@dataclass(frozen=True, slots=True)
class ClearBlocks:
    """Fill these blocks of the pool with zeros."""

    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class DigestBlocks:
    """Compute the digests of `num_blocks` blocks, each rank for its own KV heads, and gather them at the first rank.

    The block ids and their positions in the prompt are broadcast, so they are not part of the message.
    """

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the model on a batch whose numbers (token ids, positions, block tables) are broadcast to the ranks.

    `num_rows` tokens of `num_sequences` sequences are computed; each block table has `num_blocks` columns.
    `num_decodes` and `max_rows` are those of `tandem_kernels.contract.AttentionBatch`.
    """

    num_rows: int
    num_sequences: int
    num_blocks: int
    num_decodes: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class Logits:
    """Compute the logits of `num_rows` hidden states, which the first rank broadcasts."""

    num_rows: int


RankCommand = SpillBlocks | FillBlocks | CopyBlocks | ClearBlocks | DigestBlocks | Forward | Logits
"""Commands to the model, carried out in order."""


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """Start the transfer agent of a rank, which reads KV from other workers. Answered by RankRegistered.

    `worker` names the incarnation of the worker to which the rank belongs.
    """

    worker: WorkerRef


@dataclass(frozen=True, slots=True)
class StopTransfer:
    """Stop the transfer agent of a rank once its open reads have ended. Answered by TransferStopped."""


AgentCommand = StartTransfer | StopTransfer | Command
"""Commands to the transfer agent, carried out in parallel to the model's commands."""


@dataclass(frozen=True, slots=True)
class StartJoining:
    """Join the process group of the ranks: all of them are ready."""


@dataclass(frozen=True, slots=True)
class RankRefused:
    """End, because the first rank cannot work with this one. Answers RankReady."""

    message: str


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """Set an entry of the store through which ranks find each other. Any rank sends it to the first one, which passes
    it on to all others."""

    key: str
    value: bytes


GroupCommand = StartJoining | RankRefused | StoreEntry
"""Commands by which ranks form a group, before the first command to the model."""


@dataclass(frozen=True, slots=True)
class RankReady:
    """Report that the process of rank `rank` has started and is about to connect to the other ranks.

    `settings`: what must be equal for all ranks, by name.
    """

    rank: int
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Report that a rank has loaded its part of the weights and accepts commands; its pool has room for `num_blocks`
    blocks. `weights`: digest of the files that it has loaded; empty where another rank of its machine reports it."""

    num_blocks: int
    weights: str = ""


@dataclass(frozen=True, slots=True)
class RankFailed:
    """Report that the process of a rank ends because of an error."""

    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class RankRegistered:
    """Report that the KV pool of a rank can be read by other workers; `peer` describes this rank alone."""

    peer: TransportPeer


RankEvent = RankReady | StoreEntry | Loaded | RankRegistered | RankFailed | Event
