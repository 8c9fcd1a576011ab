"""Define the messages to and from a worker's transfer thread or process, and what other workers need to read its KV
pool.

Two further commands, `StartRead` and `TearDownPeer`, are effects of the engine (`engine.effects`). All are frozen
values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.engine.effects import StartRead, TearDownPeer
from tandem.kv.layout import KVLayout, KVRegion


@dataclass(frozen=True, slots=True)
class TransportRank:
    """Hold what other workers need to read the KV pool of one tensor-parallel rank.

    `agent`: name of the rank's transport agent, unique to the incarnation of the worker. `metadata`: the handshake data
    of the agent's transport. `region`: where the rank's pool is in memory, and which KV heads it holds. `host`: host
    name or address of the rank's machine; empty for the machine of the worker's address.
    """

    agent: str
    metadata: bytes
    region: KVRegion
    host: str = ""


@dataclass(frozen=True, slots=True)
class TransportPeer:
    """Hold what a worker sends to other workers so that they can read its KV blocks.

    `layout` is the layout of the whole model. A block has the same number in the pools of all `ranks`; each pool holds
    the KV heads that its region names.
    """

    worker: WorkerRef
    layout: KVLayout
    ranks: tuple[TransportRank, ...]

    @property
    def life(self) -> tuple[WorkerId, Incarnation]:
        """Return worker id and incarnation, which identify the peer; its address may be written in several forms."""
        return self.worker.id, self.worker.incarnation


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Tell the transfer thread to connect to a peer, another worker, so that the peer's blocks can be read. The thread
    answers with Connected or ConnectFailed."""

    peer: TransportPeer


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell the transfer thread to cancel the read with number `id`, that is to transfer no more of its blocks.

    Transfers already passed to the transport run to their end; the read is then reported once, like any other.
    """

    id: int


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Tell the transfer thread to transfer a few bytes of this worker's own memory through the transport. The thread
    answers with SelfTestDone, or not at all if the transport hangs."""


@dataclass(frozen=True, slots=True)
class SetPolling:
    """Tell the transfer thread how often to poll the transport: often if `busy`, else rarely.

    Set `busy` while a lease, pull or read is open on this worker. While a lease is open, peers may read from this
    worker, and their reads over TCP advance only when this worker polls.
    """

    busy: bool


Command = StartRead | ConnectPeer | Cancel | TearDownPeer | SelfTest | SetPolling


class FailureKind(Enum):
    """Why a read failed."""

    REFUSED = "refused"
    """The request is wrong: its peer is not connected, or it names a block that does not exist."""
    PEER = "peer"
    """The peer failed; all reads from it fail with it."""
    DIGEST = "digest"
    """A block that arrived differs from the block that the producer offered."""
    CANCELLED = "cancelled"
    TEARDOWN = "teardown"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ReadDone:
    """Report that all blocks of the read with number `id` arrived and passed their check.

    `num_bytes`: bytes read; on a rank, those of its own KV heads. `seconds`: from the acceptance of the command to this
    event.
    """

    id: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """Report that the read with number `id` failed.

    `drained`: nothing writes into its local blocks any more. Otherwise they must not be used until a PeerLost with
    `proven` or a PeerDrained for the peer arrives; if none arrives, until the process ends.
    """

    id: int
    kind: FailureKind
    reason: str
    drained: bool


@dataclass(frozen=True, slots=True)
class Connected:
    """Report that the blocks of `peer` can be read now."""

    peer: TransportPeer


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    """Report that no connection to `peer` could be made, and why."""

    peer: TransportPeer
    reason: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Report that the connection to `peer` has ended, after the end of each read from it was reported.

    `proven`: nothing writes into the local blocks of any of these reads any more. `reason`: why the connection has
    ended.
    """

    peer: TransportPeer
    proven: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PeerDrained:
    """Report, after a PeerLost without `proven`, that nothing writes into the local blocks of reads from `peer` any
    more."""

    peer: TransportPeer


@dataclass(frozen=True, slots=True)
class SelfTestDone:
    """Report the result of a self-test. `error`: None when the bytes arrived, else what is wrong. `seconds`: from the
    command to this event."""

    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class TransferStopped:
    """Report that the transfer thread or process has stopped, as its last event; no KV can be transferred after it.

    `error`: None after an ordered stop, otherwise the reason.
    """

    error: str | None


Event = ReadDone | ReadFailed | Connected | ConnectFailed | PeerLost | PeerDrained | SelfTestDone | TransferStopped
