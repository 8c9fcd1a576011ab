"""Define how a worker is read by others, the commands to its transfer thread or process beside `StartRead` and
`TearDownPeer`, and the events in answer, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.engine.effects import StartRead, TearDownPeer
from tandem.kv.layout import KVLayout, KVRegion


@dataclass(frozen=True, slots=True)
class TransportRank:
    """How one tensor-parallel rank of a worker is read.

    `agent`: name of its transport agent, unique to the incarnation. `metadata`: the transport's own handshake data.
    `region`: its pool.
    """

    agent: str
    metadata: bytes
    region: KVRegion


@dataclass(frozen=True, slots=True)
class TransportPeer:
    """What a worker sends to others so that they can read its blocks; `layout` is the layout of the whole model.

    A block has the same number in the pools of all ranks; each pool holds the KV heads that its region names.
    """

    worker: WorkerRef
    layout: KVLayout
    ranks: tuple[TransportRank, ...]

    @property
    def life(self) -> tuple[WorkerId, Incarnation]:
        """Return worker id and incarnation. They identify the peer; its address may be written in several ways."""
        return self.worker.id, self.worker.incarnation


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Make a peer readable; answered by Connected or ConnectFailed."""

    peer: TransportPeer


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop posting parts of a read. The read is still reported once, when the posted parts have ended."""

    id: int


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Transfer a few bytes through the transport; answered by SelfTestDone, unless a thread hangs in a transport
    call."""


@dataclass(frozen=True, slots=True)
class SetPolling:
    """Set the polling rate. `busy`: a lease is open on this worker, so peers may read from it; a peer's read over TCP
    advances only when it is polled here."""

    busy: bool


Command = StartRead | ConnectPeer | Cancel | TearDownPeer | SelfTest | SetPolling


class FailureKind(Enum):
    """Reasons why a read failed."""

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
    """All blocks of a read arrived and passed their check.

    `num_bytes`: bytes read; on a rank, those of its heads. `seconds`: from the acceptance of the request to this event.
    """

    id: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A read failed.

    `drained`: nothing writes into its local blocks any more. Otherwise the blocks are unsafe until a PeerDrained for
    its peer or, without one, until the process ends.
    """

    id: int
    kind: FailureKind
    reason: str
    drained: bool


@dataclass(frozen=True, slots=True)
class Connected:
    peer: TransportPeer


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    peer: TransportPeer
    reason: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A connected peer was disconnected; all its reads were reported before. `proven`: all of them are drained."""

    peer: TransportPeer
    proven: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PeerDrained:
    """The drain that was not proven at a PeerLost is proven now: all local blocks of reads from that peer are safe to
    reuse."""

    peer: TransportPeer


@dataclass(frozen=True, slots=True)
class SelfTestDone:
    """Result of a self-test: `error` is None when the bytes arrived. `seconds`: from the command to this event."""

    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class TransferStopped:
    """Last event of the transfer process. `error` is None after an ordered stop; otherwise no KV can be transferred any
    more."""

    error: str | None


Event = ReadDone | ReadFailed | Connected | ConnectFailed | PeerLost | PeerDrained | SelfTestDone | TransferStopped
