"""Define the messages between the first rank of a tensor-parallel executor and the other ranks, as frozen values.

The process of another rank first sends RankReady. The first rank answers with StartJoining once all ranks are ready, or
with RankRefused. Numbers that are already on a device are not part of the messages: the ranks exchange them directly,
see `Forward` and `Logits`. The pool of a rank is its part of the KV pool, the KV heads of this rank.
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
class CopyBlocks:
    """Tell a rank to copy whole blocks, in the order of the fields, which are those of `StepPlan`.

    `spills`: from its pool to its host memory, as pairs (block, host slot). `fills`: from its host memory back to its
    pool, as pairs (host slot, block). `copies`: within its pool, as pairs (source block, target block).
    """

    spills: tuple[Offload, ...]
    fills: tuple[Onload, ...]
    copies: tuple[tuple[BlockId, BlockId], ...]


@dataclass(frozen=True, slots=True)
class ClearBlocks:
    """Tell a rank to fill `blocks` of its pool with zeros."""

    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class DigestBlocks:
    """Tell a rank to compute the digests of `num_blocks` blocks for its own KV heads, and to send them to the first
    rank by a gather.

    The first rank broadcasts the block ids and their indices in the prompt to all ranks, so they are not part of the
    message.
    """

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Tell a rank to run its part of the model on a batch. The first rank broadcasts the batch's numbers (token ids,
    positions, block tables) to all ranks, so the message has only their sizes.

    `num_rows`: tokens that are computed. `num_sequences`: sequences to which these tokens belong; the first
    `num_decodes` of them compute one token each. `num_blocks`: columns of the block tables. `max_rows`: no sequence
    computes more tokens. See `tandem_kernels.contract.AttentionBatch`.
    """

    num_rows: int
    num_sequences: int
    num_blocks: int
    num_decodes: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class Logits:
    """Tell a rank to compute its part of the logits of `num_rows` tokens, whose hidden states the first rank broadcasts
    to all ranks."""

    num_rows: int


RankCommand = CopyBlocks | ClearBlocks | DigestBlocks | Forward | Logits
"""Commands to the model, carried out in order."""


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """Tell a rank to start its transfer agent, which reads KV from other workers. The rank answers with RankRegistered.

    `worker`: the incarnation of the worker to which the rank belongs.
    """

    worker: WorkerRef


@dataclass(frozen=True, slots=True)
class StopTransfer:
    """Tell a rank to stop its transfer agent once the agent's open reads have ended. The rank answers with
    TransferStopped."""


AgentCommand = StartTransfer | StopTransfer | Command
"""Commands to the transfer agent, carried out in parallel to the model's commands."""


@dataclass(frozen=True, slots=True)
class StartJoining:
    """Tell a rank to join the process group of the ranks, because all of them are ready."""


@dataclass(frozen=True, slots=True)
class RankRefused:
    """Tell a rank to end its process, because the first rank cannot work with it. `message`: the reason. Sent in answer
    to RankReady, or after Loaded if the rank has loaded another model."""

    message: str


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """Tell a rank to set the entry `key` to `value` in its copy of the store through which ranks find each other.

    A rank that sets an entry sends it to the first rank, which passes it on to all other ranks.
    """

    key: str
    value: bytes


GroupCommand = StartJoining | RankRefused | StoreEntry
"""Commands by which ranks form a group, before the first command to the model."""


@dataclass(frozen=True, slots=True)
class RankReady:
    """Report to the first rank that the process of rank `rank` has started and is about to connect to the other ranks.

    `settings`: the settings that must be equal on all ranks, as text by name.
    """

    rank: int
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Report to the first rank that a rank has loaded its part of the model and accepts commands.

    `weights`: digest of the model files on its machine; empty where another rank of this machine reports it, or the
    worker runs on one machine only.
    """

    weights: str = ""


@dataclass(frozen=True, slots=True)
class RankFailed:
    """Report to the first rank that the process of a rank ends because of an error. `kind`, `message`: the error."""

    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class RankRegistered:
    """Report to the first rank that other workers can read the pool of a rank. `peer`: what they need to read this one
    pool."""

    peer: TransportPeer


RankEvent = RankReady | StoreEntry | Loaded | RankRegistered | RankFailed | Event
