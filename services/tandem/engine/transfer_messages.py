"""Define the commands to a worker's transfer thread or process and its events, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tandem.engine.ports import BlockCopy, TransportPeer


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Copy blocks of `peer`, check them, and report once under `id`, which is unique among open reads.

    `logical[i]` is the position of `copies[i]` in the prompt's block table, which the digest covers. `digests[i]` are
    the numbers that the producer computed, one per KV head of the model; with `digests=None` nothing is checked.
    """

    id: int
    peer: TransportPeer
    copies: tuple[BlockCopy, ...]
    logical: tuple[int, ...]
    digests: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if len(self.logical) != len(self.copies):
            raise ValueError(f"{len(self.copies)} copies with {len(self.logical)} logical indices")
        if self.digests is not None and len(self.digests) != len(self.copies):
            raise ValueError(f"{len(self.copies)} copies with {len(self.digests)} digests")


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Make a peer readable; answered by Connected or ConnectFailed."""

    peer: TransportPeer


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop posting parts of a read. The read is still reported once, when the posted parts have ended."""

    id: int


@dataclass(frozen=True, slots=True)
class TearDownPeer:
    """Disconnect a peer and end all reads from it; answered by PeerLost unless it is disconnected already."""

    peer: TransportPeer
    reason: str


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Transfer a few bytes through the transport; answered by SelfTestDone."""


@dataclass(frozen=True, slots=True)
class SetPolling:
    """Set the polling rate. `busy`: a lease is open on this worker, so peers may read from it."""

    busy: bool


Command = ReadRequest | ConnectPeer | Cancel | TearDownPeer | SelfTest | SetPolling


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
