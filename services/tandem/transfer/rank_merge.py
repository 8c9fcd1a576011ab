"""What the movers of several ranks say, joined into what one mover would say; pure, owns no thread and never waits.

A peer is connected when it is so at every rank. An order goes to all of them and is over when each has answered. Where
one rank loses a peer, the others are told to give it up as well; that it is lost is said when all have, and no order of
it is open any more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from tandem.engine.ports import TransportPeer
from tandem.engine.transfer_messages import (
    Cancel,
    Command,
    Connected,
    ConnectFailed,
    ConnectPeer,
    Event,
    FailureKind,
    PeerDrained,
    PeerLost,
    ReadDone,
    ReadFailed,
    ReadRequest,
    SelfTest,
    SelfTestDone,
    SetPolling,
    TearDownPeer,
    TransferStopped,
)


class _RankState(Enum):
    """How a peer stands at one rank, as far as has been heard."""

    OUT = auto()
    ASKED = auto()
    IN = auto()
    LEAVING = auto()
    LINGERING = auto()


class _Phase(Enum):
    """How a peer stands as a whole. LOSING: given up, and some rank has not said yet that it is lost there."""

    DOWN = auto()
    CONNECTING = auto()
    UP = auto()
    LOSING = auto()


@dataclass(slots=True, eq=False)
class _Peer:
    """`reason`: the first one for which it is given up. `is_owed_end`: it was said to be connected, so its loss will
    be said. `held` waits for the end of a phase."""

    peer: TransportPeer
    ranks: list[_RankState]
    phase: _Phase = _Phase.DOWN
    reason: str = ""
    num_orders: int = 0
    is_owed_end: bool = False
    held: deque[ConnectPeer | TearDownPeer] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Order:
    """`waiting`: ranks that have not answered. `unsafe`: those that may still write to its blocks."""

    of: _Peer
    waiting: set[int]
    unsafe: set[int] = field(default_factory=set)
    num_bytes: int = 0
    seconds: float = 0.0
    failure: tuple[FailureKind, str] | None = None


@dataclass(slots=True)
class _Test:
    waiting: set[int]
    error: str | None = None
    seconds: float = 0.0


class RankEventMerger:
    """Commands in by `ask`, the ranks' events by `heard`; what follows from them is taken from `events` and `commands`.

    Relies on each rank to answer commands in their order, and to say MoverStopped last. `is_over`: a rank has stopped,
    so all must be halted, and nothing may be asked any more.
    """

    def __init__(self, num_ranks: int) -> None:
        self.events: deque[Event] = deque()
        self.commands: deque[tuple[int, Command]] = deque()
        self.is_over = False
        self._num_ranks = num_ranks
        self._peers: dict[TransportPeer, _Peer] = {}
        self._orders: dict[int, _Order] = {}
        self._test: _Test | None = None
        self._stopped: set[int] = set()
        self._error: str | None = None

    def __repr__(self) -> str:
        peers = ", ".join(f"{known.peer.worker} {known.phase.name.lower()}" for known in self._peers.values())
        return f"Joint({self._num_ranks} ranks, {len(self._orders)} orders, {peers or 'no peers'})"

    def ask(self, command: Command) -> None:
        match command:
            case ReadRequest():
                self._ask_order(command)
            case ConnectPeer():
                self._ask_connect(command)
            case TearDownPeer():
                self._ask_teardown(command)
            case Cancel(id):
                if id in self._orders:
                    self._tell(self._orders[id].waiting, command)
            case SelfTest():
                if self._test is None:
                    self._test = _Test(set(range(self._num_ranks)))
                    self._tell_all(command)
            case SetPolling():
                self._tell_all(command)

    def heard(self, rank: int, event: Event) -> None:
        match event:
            case ReadDone() | ReadFailed():
                self._end_order_at(rank, event)
            case Connected(peer):
                self._move(rank, peer, _RankState.IN, before=(_RankState.ASKED,))
            case ConnectFailed(peer, reason):
                self._move(rank, peer, _RankState.OUT, before=(_RankState.ASKED,), reason=reason)
            case PeerLost(peer, proven, reason):
                # In other states it answers a teardown that crossed the rank's own loss of the peer.
                after = _RankState.OUT if proven else _RankState.LINGERING
                self._move(rank, peer, after, before=(_RankState.IN, _RankState.LEAVING), reason=reason)
            case PeerDrained(peer):
                self._drain_at(rank, peer)
            case SelfTestDone(error, seconds):
                self._end_test_at(rank, error, seconds)
            case TransferStopped(error):
                self._stop_at(rank, error)

    def _tell(self, ranks: set[int], command: Command) -> None:
        self.commands.extend((rank, command) for rank in sorted(ranks))

    def _tell_all(self, command: Command) -> None:
        self._tell(set(range(self._num_ranks)), command)

    # Orders

    def _ask_order(self, order: ReadRequest) -> None:
        """A second order under an open id is the first one sent twice: it is reported once."""
        if order.id in self._orders:
            return
        known = self._peers.get(order.peer)
        if known is None or known.phase is not _Phase.UP:
            reason = f"{order.peer.worker} is not connected"
            self.events.append(ReadFailed(order.id, FailureKind.REFUSED, reason, drained=True))
            return
        known.num_orders += 1
        self._orders[order.id] = _Order(known, set(range(self._num_ranks)))
        self._tell_all(order)

    def _end_order_at(self, rank: int, event: ReadDone | ReadFailed) -> None:
        order = self._orders[event.id]
        order.waiting.remove(rank)
        if isinstance(event, ReadDone):
            order.num_bytes += event.num_bytes
            order.seconds = max(order.seconds, event.seconds)
        else:
            if not event.drained:
                order.unsafe.add(rank)
            if order.failure is None:
                order.failure = event.kind, event.reason
                self._tell(order.waiting, Cancel(event.id))
        if not order.waiting:
            del self._orders[event.id]
            self.events.append(_report(event.id, order))
            order.of.num_orders -= 1
            self._settle(order.of)

    # Peers

    def _ask_connect(self, command: ConnectPeer) -> None:
        peer = command.peer
        known = self._peers.setdefault(peer, _Peer(peer, [_RankState.OUT] * self._num_ranks))
        if known.phase is _Phase.UP:
            self.events.append(Connected(peer))
        elif known.phase is not _Phase.DOWN:
            known.held.append(command)
        elif _RankState.LINGERING in known.ranks:
            self.events.append(ConnectFailed(peer, f"a read of {peer.worker} is not proven to have ended"))
        else:
            known.phase, known.ranks, known.reason = _Phase.CONNECTING, [_RankState.ASKED] * self._num_ranks, ""
            self._tell_all(command)

    def _ask_teardown(self, command: TearDownPeer) -> None:
        """One that is given up already is answered by the end of that."""
        known = self._peers.get(command.peer)
        if known is None:
            self.events.append(PeerLost(command.peer, True, command.reason))
        elif known.phase is _Phase.UP:
            self._lose(known, command.reason)
        elif known.phase is _Phase.CONNECTING:
            known.held.append(command)

    def _move(
        self, rank: int, peer: TransportPeer, after: _RankState, before: tuple[_RankState, ...], reason: str = ""
    ) -> None:
        """A peer stands otherwise at a rank than before."""
        known = self._peers.get(peer)
        if known is not None and known.ranks[rank] in before:
            known.ranks[rank] = after
            known.reason = known.reason or reason
            self._settle(known)

    def _settle(self, known: _Peer) -> None:
        """End the phase when all that it waits for has come."""
        if known.phase is _Phase.CONNECTING and _RankState.ASKED not in known.ranks:
            if known.ranks == [_RankState.IN] * self._num_ranks:
                known.phase, known.is_owed_end = _Phase.UP, True
                self.events.append(Connected(known.peer))
                self._release(known)
            else:
                self.events.append(ConnectFailed(known.peer, known.reason))
                self._lose(known, known.reason)
        elif known.phase is _Phase.UP and known.ranks != [_RankState.IN] * self._num_ranks:
            self._lose(known, known.reason)
        elif (
            known.phase is _Phase.LOSING
            and known.num_orders == 0
            and not {_RankState.IN, _RankState.LEAVING} & {*known.ranks}
        ):
            known.phase = _Phase.DOWN
            if known.is_owed_end:
                known.is_owed_end = False
                self.events.append(PeerLost(known.peer, _RankState.LINGERING not in known.ranks, known.reason))
            self._release(known)

    def _lose(self, known: _Peer, reason: str) -> None:
        known.phase, known.reason = _Phase.LOSING, known.reason or reason
        for rank, at in enumerate(known.ranks):
            if at is _RankState.IN:
                known.ranks[rank] = _RankState.LEAVING
                self._tell({rank}, TearDownPeer(known.peer, known.reason))
        self._settle(known)

    def _release(self, known: _Peer) -> None:
        """After the end of a phase: what was held, and a peer of which nothing is left is forgotten."""
        if known.phase is _Phase.DOWN and _RankState.LINGERING not in known.ranks:
            del self._peers[known.peer]
        held, known.held = known.held, deque()
        for command in held:
            self.ask(command)

    def _drain_at(self, rank: int, peer: TransportPeer) -> None:
        known = self._peers[peer]
        known.ranks[rank] = _RankState.OUT
        for order in self._orders.values():
            if order.of is known:
                order.unsafe.discard(rank)
        if known.phase is _Phase.DOWN and _RankState.LINGERING not in known.ranks:
            self.events.append(PeerDrained(peer))
            self._release(known)

    # Ends

    def _end_test_at(self, rank: int, error: str | None, seconds: float) -> None:
        test = self._test
        if test is None or rank not in test.waiting:
            return
        test.waiting.remove(rank)
        test.seconds = max(test.seconds, seconds)
        test.error = test.error or (None if error is None else f"rank {rank}: {error}")
        if not test.waiting:
            self._test = None
            self.events.append(SelfTestDone(test.error, test.seconds))

    def _stop_at(self, rank: int, error: str | None) -> None:
        """A rank that ended in order has answered everything; what one owes that did not is in doubt for ever."""
        self.is_over = True
        self._stopped.add(rank)
        self._error = self._error or (None if error is None else f"rank {rank}: {error}")
        reason = error or "the transfer thread was stopped"
        for id, order in list(self._orders.items()):
            if rank in order.waiting:
                self._end_order_at(rank, ReadFailed(id, FailureKind.STOPPED, reason, drained=False))
        self._end_test_at(rank, reason, 0.0)
        if len(self._stopped) == self._num_ranks:
            self.events.append(TransferStopped(self._error))


def _report(id: int, order: _Order) -> ReadDone | ReadFailed:
    if order.failure is None:
        return ReadDone(id, order.num_bytes, order.seconds)
    kind, reason = order.failure
    return ReadFailed(id, kind, reason, drained=not order.unsafe)
