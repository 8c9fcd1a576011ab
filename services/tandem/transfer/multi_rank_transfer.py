"""Drive the transfers of all ranks of a worker as one: send each command to the ranks and merge their events.

A peer is connected when every rank has connected it. A read goes to all ranks and is over when each has answered. When
one rank loses a peer, the others are commanded to tear it down too; PeerLost is reported when all have done so and no
read of the peer is open. `RankEventMerger` decides this without I/O, threads or waiting; `MultiRankTransfer` calls it
under a lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from tandem.engine.effects import StartRead, TearDownPeer
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
    SelfTest,
    SelfTestDone,
    SetPolling,
    TransferStopped,
    TransportPeer,
)
from tandem.transfer.interface import KVTransfer, OpenKVTransfer


class _RankState(Enum):
    """State of a peer at one rank, by the events received so far. LINGERING: lost, with a read perhaps still open."""

    DISCONNECTED = auto()
    CONNECTING = auto()
    CONNECTED = auto()
    LEAVING = auto()
    LINGERING = auto()


@dataclass(slots=True, eq=False)
class _Peer:
    """A peer and its state at each rank.

    `reason`: the first reason why the peer is torn down. `is_connecting`: Connected or ConnectFailed must follow.
    `owes_peer_lost`: Connected was reported, so PeerLost must follow. `held`: commands that wait until the peer is up
    or down.
    """

    peer: TransportPeer
    ranks: list[_RankState]
    is_connecting: bool = False
    reason: str = ""
    num_requests: int = 0
    owes_peer_lost: bool = False
    held: deque[ConnectPeer | TearDownPeer] = field(default_factory=deque)

    @property
    def is_up(self) -> bool:
        return set(self.ranks) == {_RankState.CONNECTED}

    @property
    def is_down(self) -> bool:
        """Return whether no read request of the peer is open, and no rank is connected to it any more. Bytes of a
        failed read may still be written at a rank (LINGERING)."""
        has_work = self.is_connecting or self.num_requests > 0
        return not has_work and set(self.ranks) <= {_RankState.DISCONNECTED, _RankState.LINGERING}


@dataclass(slots=True, eq=False)
class _Request:
    """An open read request. `waiting`: ranks yet to answer. `unsafe`: ranks that may still write to its blocks."""

    peer: _Peer
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
    """Turn each command for a worker into commands for its ranks, and the ranks' events into one event per command.

    The caller passes commands to `submit`, and the events of ranks to `on_event`. After each call it takes the results
    out of two queues: `commands` has pairs of a rank and a command to be sent to that rank; `events` has the merged
    events. Each rank must answer commands in their order and report TransferStopped last. `is_over`: a rank has
    stopped, so the caller must halt all ranks and submit no further command.
    """

    def __init__(self, num_ranks: int) -> None:
        self.events: deque[Event] = deque()
        self.commands: deque[tuple[int, Command]] = deque()
        self.is_over = False
        self._num_ranks = num_ranks
        self._peers: dict[TransportPeer, _Peer] = {}
        self._requests: dict[int, _Request] = {}
        self._test: _Test | None = None
        self._stopped: set[int] = set()
        self._error: str | None = None

    def __repr__(self) -> str:
        peers = ", ".join(f"{known.peer.worker} {'up' if known.is_up else 'not up'}" for known in self._peers.values())
        return f"RankEventMerger({self._num_ranks} ranks, {len(self._requests)} requests, {peers or 'no peers'})"

    def submit(self, command: Command) -> None:
        match command:
            case StartRead():
                self._submit_read(command)
            case ConnectPeer():
                self._submit_connect(command)
            case TearDownPeer():
                self._submit_teardown(command)
            case Cancel(id):
                if id in self._requests:
                    self._send(self._requests[id].waiting, command)
            case SelfTest():
                if self._test is None:
                    self._test = _Test(set(range(self._num_ranks)))
                    self._send_all(command)
            case SetPolling():
                self._send_all(command)

    def on_event(self, rank: int, event: Event) -> None:
        match event:
            case ReadDone() | ReadFailed():
                self._end_request_at(rank, event)
            case Connected(peer):
                self._set_rank_state(rank, peer, _RankState.CONNECTED, before=(_RankState.CONNECTING,))
            case ConnectFailed(peer, reason):
                self._set_rank_state(
                    rank, peer, _RankState.DISCONNECTED, before=(_RankState.CONNECTING,), reason=reason
                )
            case PeerLost(peer, proven, reason):
                # In other states it answers a teardown that crossed the rank's own loss of the peer.
                after = _RankState.DISCONNECTED if proven else _RankState.LINGERING
                self._set_rank_state(
                    rank, peer, after, before=(_RankState.CONNECTED, _RankState.LEAVING), reason=reason
                )
            case PeerDrained(peer):
                self._drain_at(rank, peer)
            case SelfTestDone(error, seconds):
                self._end_test_at(rank, error, seconds)
            case TransferStopped(error):
                self._stop_at(rank, error)

    def _send(self, ranks: set[int], command: Command) -> None:
        self.commands.extend((rank, command) for rank in sorted(ranks))

    def _send_all(self, command: Command) -> None:
        self._send(set(range(self._num_ranks)), command)

    # Read requests

    def _submit_read(self, command: StartRead) -> None:
        """Send a read to all ranks. A second command with the id of an open read is a duplicate, and is ignored."""
        if command.read in self._requests:
            return
        life = (command.source.id, command.source.incarnation)
        known = next((x for x in self._peers.values() if x.is_up and x.peer.life == life), None)
        if known is None:
            reason = f"{command.source} is not connected"
            self.events.append(ReadFailed(command.read, FailureKind.REFUSED, reason, drained=True))
            return
        known.num_requests += 1
        self._requests[command.read] = _Request(known, set(range(self._num_ranks)))
        self._send_all(command)

    def _end_request_at(self, rank: int, event: ReadDone | ReadFailed) -> None:
        request = self._requests[event.id]
        request.waiting.remove(rank)
        if isinstance(event, ReadDone):
            request.num_bytes += event.num_bytes
            request.seconds = max(request.seconds, event.seconds)
        else:
            if not event.drained:
                request.unsafe.add(rank)
            if request.failure is None:
                request.failure = event.kind, event.reason
                self._send(request.waiting, Cancel(event.id))
        if not request.waiting:
            del self._requests[event.id]
            self.events.append(_report(event.id, request))
            request.peer.num_requests -= 1
            self._settle(request.peer)

    # Peers

    def _submit_connect(self, command: ConnectPeer) -> None:
        peer = command.peer
        known = self._peers.setdefault(peer, _Peer(peer, [_RankState.DISCONNECTED] * self._num_ranks))
        if known.is_up:
            self.events.append(Connected(peer))
        elif not known.is_down:
            known.held.append(command)
        elif _RankState.LINGERING in known.ranks:
            self.events.append(ConnectFailed(peer, f"a read of {peer.worker} is not proven to have ended"))
        else:
            known.is_connecting = True
            known.ranks = [_RankState.CONNECTING] * self._num_ranks
            known.reason = ""
            self._send_all(command)

    def _submit_teardown(self, command: TearDownPeer) -> None:
        """Tear a peer down. The end of a teardown that is already under way answers the command."""
        life = (command.source.id, command.source.incarnation)
        for known in [known for known in self._peers.values() if known.peer.life == life]:
            if known.is_up:
                known.reason = known.reason or command.reason
                self._tear_down(known)
            elif known.is_connecting:
                known.held.append(command)

    def _set_rank_state(
        self, rank: int, peer: TransportPeer, after: _RankState, before: tuple[_RankState, ...], reason: str = ""
    ) -> None:
        """Change the state of a peer at a rank to `after`, if it is one of `before`."""
        known = self._peers.get(peer)
        if known is not None and known.ranks[rank] in before:
            known.ranks[rank] = after
            known.reason = known.reason or reason
            self._settle(known)

    def _settle(self, known: _Peer) -> None:
        """Report a peer that all ranks have connected; tear it down if a rank could not connect it or has lost it."""
        if _RankState.CONNECTING in known.ranks or (known.is_up and not known.is_connecting):
            return
        if known.is_connecting:
            known.is_connecting = False
            if known.is_up:
                known.owes_peer_lost = True
                self.events.append(Connected(known.peer))
                self._release(known)
                return
            self.events.append(ConnectFailed(known.peer, known.reason))
        self._tear_down(known)

    def _tear_down(self, known: _Peer) -> None:
        """Tear a peer down where it is still connected, and report its loss once all ranks have done so."""
        for rank, state in enumerate(known.ranks):
            if state is _RankState.CONNECTED:
                known.ranks[rank] = _RankState.LEAVING
                self._send({rank}, TearDownPeer(known.peer.worker, known.reason))
        if not known.is_down:
            return
        if known.owes_peer_lost:
            known.owes_peer_lost = False
            self.events.append(PeerLost(known.peer, _RankState.LINGERING not in known.ranks, known.reason))
        self._release(known)

    def _release(self, known: _Peer) -> None:
        """Submit the held commands of a peer that is up or down, and forget a peer that no rank holds any more."""
        if set(known.ranks) == {_RankState.DISCONNECTED}:
            del self._peers[known.peer]
        held, known.held = known.held, deque()
        for command in held:
            self.submit(command)

    def _drain_at(self, rank: int, peer: TransportPeer) -> None:
        known = self._peers[peer]
        known.ranks[rank] = _RankState.DISCONNECTED
        for request in self._requests.values():
            if request.peer is known:
                request.unsafe.discard(rank)
        if known.is_down and _RankState.LINGERING not in known.ranks:
            self.events.append(PeerDrained(peer))
            self._release(known)

    # Self-tests and stops

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
        """Fail what a stopped rank has not answered.

        A rank that stopped in order has answered everything; the blocks of other requests stay unsafe for good.
        """
        self.is_over = True
        self._stopped.add(rank)
        self._error = self._error or (None if error is None else f"rank {rank}: {error}")
        reason = error or "the transfer thread was stopped"
        for id, request in list(self._requests.items()):
            if rank in request.waiting:
                self._end_request_at(rank, ReadFailed(id, FailureKind.STOPPED, reason, drained=False))
        self._end_test_at(rank, reason, 0.0)
        if len(self._stopped) == self._num_ranks:
            self.events.append(TransferStopped(self._error))


def _report(id: int, request: _Request) -> ReadDone | ReadFailed:
    if request.failure is None:
        return ReadDone(id, request.num_bytes, request.seconds)
    kind, reason = request.failure
    return ReadFailed(id, kind, reason, drained=not request.unsafe)


class MultiRankTransfer(KVTransfer):
    """Drive all ranks of a worker as one `KVTransfer`: a read ends when every rank has read its part.

    `open_ranks[r]`: opens the transfer of rank r, which may run in another process. `on_event`: receives the merged
    events, one call at a time and in order, on the threads of the ranks and on those that call `send`; it must not
    block or raise. When one rank stops, the others are halted.
    """

    def __init__(self, open_ranks: Sequence[OpenKVTransfer], on_event: Callable[[Event], None]) -> None:
        self._merger = RankEventMerger(len(open_ranks))
        self._on_event = on_event
        self._is_open = True
        self._is_dispatching = False
        self._lock = threading.RLock()
        self._ranks: list[KVTransfer] = []
        with self._lock:
            self._ranks.extend(open_rank(partial(self._receive, rank)) for rank, open_rank in enumerate(open_ranks))

    def __repr__(self) -> str:
        return f"MultiRankTransfer({self._merger!r})"

    def start(self) -> None:
        for transfer in self._ranks:
            transfer.start()

    def send(self, command: Command) -> None:
        """Queue a command for the ranks. Raises RuntimeError after a halt or once a rank has stopped, because no event
        would report the result."""
        with self._lock:
            if not self._is_open:
                raise RuntimeError("the transfer thread has stopped")
            self._merger.submit(command)
            self._dispatch()

    def halt(self) -> None:
        with self._lock:
            self._is_open = False
            for transfer in self._ranks:
                transfer.halt()

    def join(self, timeout_s: float) -> bool:
        """Wait until the transfers of all ranks have ended, up to `timeout_s` seconds for each rank.

        Returns False when one of them is still running then.
        """
        have_ended = [transfer.join(timeout_s) for transfer in self._ranks]
        return all(have_ended)

    def _receive(self, rank: int, event: Event) -> None:
        with self._lock:
            self._merger.on_event(rank, event)
            self._dispatch()

    def _dispatch(self) -> None:
        """Send the commands and publish the events that the merger has produced.

        A rank may answer inside `send`: the outer call of this method then handles the answer.
        """
        if self._is_dispatching:
            return
        self._is_dispatching = True
        merger = self._merger
        try:
            while merger.commands or merger.events:
                if merger.commands:
                    rank, command = merger.commands.popleft()
                    # A rank that accepts no more commands reports TransferStopped, which answers them all.
                    with contextlib.suppress(RuntimeError):
                        self._ranks[rank].send(command)
                else:
                    self._on_event(merger.events.popleft())
        finally:
            self._is_dispatching = False
        if merger.is_over and self._is_open:
            self.halt()
