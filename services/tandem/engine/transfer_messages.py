"""What a worker asks of its mover and what comes back, as frozen values; never touches a transport."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tandem.engine.ports import BlockCopy, TransportPeer


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Copy blocks of `peer`, then check them, then report once under `id`, which is unique among open orders.

    `logical[i]` is the position of `copies[i]` in the prompt's block table, which the digest covers.
    `digests[i]` is what the producer computed, one number per KV head of the model; `digests=None` checks nothing.
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
    """Post nothing more for an order. It is still reported once, when what was posted has ended."""

    id: int


@dataclass(frozen=True, slots=True)
class TearDownPeer:
    """Give a peer up with all its orders; answered by PeerLost, unless it is given up already."""

    peer: TransportPeer
    reason: str


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Move a few bytes through the transport; answered by SelfTestDone."""


@dataclass(frozen=True, slots=True)
class SetPolling:
    """`busy`: a lease is open here, so peers may read from us."""

    busy: bool


Command = ReadRequest | ConnectPeer | Cancel | TearDownPeer | SelfTest | SetPolling


class FailureKind(Enum):
    """Why an order failed."""

    REFUSED = "refused"
    """The order itself is wrong: its peer is not connected, or it names a block that does not exist."""
    PEER = "peer"
    """The peer failed; all its orders fail with it."""
    DIGEST = "digest"
    """A block that arrived is not the block that the producer offered."""
    CANCELLED = "cancelled"
    TEARDOWN = "teardown"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ReadDone:
    """All blocks arrived and passed their check. `num_bytes` of them did: of a rank, those of its heads. `seconds` from
    the order's acceptance to here."""

    id: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """`drained`: nothing writes the order's blocks any more. Otherwise they are unsafe until PeerDrained names its
    peer or, where that never comes, until this process ends."""

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
    """A peer that was connected is so no more; all its orders were reported before. `proven`: all are drained."""

    peer: TransportPeer
    proven: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PeerDrained:
    """The proof that was missing at a PeerLost: every block of that peer's orders is safe to reuse."""

    peer: TransportPeer


@dataclass(frozen=True, slots=True)
class SelfTestDone:
    """`error` is None when the bytes arrived. `seconds` from the command to here."""

    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class TransferStopped:
    """The last event. `error` is None after an ordered stop; otherwise the worker can move no KV any more."""

    error: str | None


Event = ReadDone | ReadFailed | Connected | ConnectFailed | PeerLost | PeerDrained | SelfTestDone | TransferStopped
