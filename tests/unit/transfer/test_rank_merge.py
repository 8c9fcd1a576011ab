"""Test the merger of rank events: each order is answered once, and not before it has ended at every rank."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

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
from tandem.transfer.interface import PeerError, ReadState
from tandem.transfer.multi_rank_transfer import RankEventMerger
from tandem.transfer.transfer_engine import TransferEngine
from tests.effort import effort
from tests.unit.transfer.scripted import BLOCK_BYTES, ManualClock, P, Q, ScriptedTransport, digest, order, peer_named


class Two:
    """A merger of two ranks whose events the test feeds."""

    def __init__(self) -> None:
        self.merger = RankEventMerger(2)

    def submit(self, command: Command) -> list[Event]:
        self.merger.submit(command)
        return self.events()

    def on_event(self, rank: int, event: Event) -> list[Event]:
        self.merger.on_event(rank, event)
        return self.events()

    def events(self) -> list[Event]:
        events = list(self.merger.events)
        self.merger.events.clear()
        return events

    def take_commands(self) -> list[tuple[int, Command]]:
        commands = list(self.merger.commands)
        self.merger.commands.clear()
        return commands

    def connect(self, peer: TransportPeer = P) -> None:
        assert self.submit(ConnectPeer(peer)) == []
        assert self.on_event(0, Connected(peer)) == []
        assert self.on_event(1, Connected(peer)) == [Connected(peer)]
        assert self.take_commands() == [(0, ConnectPeer(peer)), (1, ConnectPeer(peer))]


MAX_ROUNDS = 1000
"""Ends a test whose ranks do not come to rest."""


@pytest.fixture
def two() -> Two:
    return Two()


def failed(id: int, kind: FailureKind, reason: str = "", *, drained: bool = True) -> ReadFailed:
    return ReadFailed(id, kind, reason, drained)


def test_an_order_is_done_when_every_rank_has_its_part(two: Two) -> None:
    two.connect()
    read = order(1)
    assert two.submit(read) == two.submit(read) == [], "the same order twice is one"
    assert two.take_commands() == [(0, read), (1, read)]
    assert two.on_event(1, ReadDone(1, 100, 0.5)) == []
    assert two.on_event(0, ReadDone(1, 100, 0.2)) == [ReadDone(1, 200, 0.5)]


def test_one_rank_that_fails_an_order_ends_it_at_the_others(two: Two) -> None:
    two.connect()
    two.submit(order(1))
    two.take_commands()
    assert two.on_event(0, failed(1, FailureKind.DIGEST, "another block")) == []
    assert two.take_commands() == [(1, Cancel(1))]
    assert two.on_event(1, failed(1, FailureKind.CANCELLED)) == [failed(1, FailureKind.DIGEST, "another block")]
    two.submit(order(2))
    two.take_commands()
    two.on_event(0, ReadDone(2, 100, 0.1))
    assert two.on_event(1, failed(2, FailureKind.DIGEST, "x")) == [failed(2, FailureKind.DIGEST, "x")]
    assert two.take_commands() == [], "rank 0 is done with it"


def test_a_cancel_goes_to_the_ranks_that_still_read(two: Two) -> None:
    two.connect()
    two.submit(order(1))
    two.on_event(0, ReadDone(1, 100, 0.1))
    two.take_commands()
    two.submit(Cancel(1))
    two.submit(Cancel(99))
    assert two.take_commands() == [(1, Cancel(1))]


def test_a_connection_that_fails_at_one_rank_is_torn_down_at_the_others(two: Two) -> None:
    two.submit(ConnectPeer(P))
    assert two.on_event(0, Connected(P)) == []
    two.take_commands()
    assert two.on_event(1, ConnectFailed(P, "no route")) == [ConnectFailed(P, "no route")]
    assert two.take_commands() == [(0, TearDownPeer(P.worker, "no route"))]
    assert two.submit(ConnectPeer(P)) == [], "waits for the end of the first"
    assert two.take_commands() == []
    assert two.on_event(0, PeerLost(P, True, "no route")) == [], "nobody was told that it was connected"
    assert two.take_commands() == [(0, ConnectPeer(P)), (1, ConnectPeer(P))]
    two.on_event(0, Connected(P))
    assert two.on_event(1, Connected(P)) == [Connected(P)]
    assert two.submit(ConnectPeer(P)) == [Connected(P)], "once more costs nothing"
    assert two.take_commands() == []


def test_an_order_for_nobody_is_refused(two: Two) -> None:
    two.submit(ConnectPeer(P))
    (event,) = two.submit(order(1))
    assert isinstance(event, ReadFailed)
    assert (event.kind, event.drained) == (FailureKind.REFUSED, True)
    assert two.submit(TearDownPeer(Q.worker, "who?")) == []


def test_a_peer_that_one_rank_loses_is_lost_when_all_have_given_it_up(two: Two) -> None:
    two.connect()
    two.submit(order(1))
    two.take_commands()
    two.on_event(0, failed(1, FailureKind.PEER, "reset"))
    assert two.on_event(0, PeerLost(P, True, "reset")) == []
    assert two.take_commands() == [(1, Cancel(1)), (1, TearDownPeer(P.worker, "reset"))]
    assert two.submit(order(2)) == [failed(2, FailureKind.REFUSED, f"{P.worker} is not connected")]
    assert two.on_event(1, failed(1, FailureKind.CANCELLED)) == [failed(1, FailureKind.PEER, "reset")]
    assert two.on_event(1, PeerLost(P, True, "reset")) == [PeerLost(P, True, "reset")]


def test_the_loss_of_a_peer_waits_for_the_answer_to_an_order_that_is_late_at_one_rank(two: Two) -> None:
    two.connect()
    two.submit(order(1))
    two.on_event(0, PeerLost(P, True, "reset"))
    two.on_event(1, failed(1, FailureKind.TEARDOWN, "reset"))
    assert two.on_event(1, PeerLost(P, True, "reset")) == []
    late = failed(1, FailureKind.REFUSED, "not connected")
    assert two.on_event(0, late) == [failed(1, FailureKind.TEARDOWN, "reset"), PeerLost(P, True, "reset")]


def test_both_ranks_may_lose_a_peer_at_once(two: Two) -> None:
    """The teardown crosses the loss, and is answered like one of a stranger, even after the next connection began."""
    two.connect()
    two.on_event(0, PeerLost(P, True, "reset"))
    assert two.take_commands() == [(1, TearDownPeer(P.worker, "reset"))]
    assert two.on_event(1, PeerLost(P, True, "gone")) == [PeerLost(P, True, "reset")]
    two.submit(ConnectPeer(P))
    assert two.on_event(1, PeerLost(P, True, "reset")) == [], "late"
    two.on_event(1, Connected(P))
    assert two.on_event(0, Connected(P)) == [Connected(P)]


def test_what_one_rank_cannot_prove_is_not_proven(two: Two) -> None:
    two.connect()
    two.submit(order(1))
    two.submit(TearDownPeer(P.worker, "slow"))
    two.submit(TearDownPeer(P.worker, "again"))
    two.on_event(0, failed(1, FailureKind.TEARDOWN, "slow"))
    two.on_event(0, PeerLost(P, True, "slow"))
    slow = failed(1, FailureKind.TEARDOWN, "slow", drained=False)
    assert two.on_event(1, slow) == [slow]
    assert two.on_event(1, PeerLost(P, False, "slow")) == [PeerLost(P, False, "slow")]
    (refused,) = two.submit(ConnectPeer(P))
    assert isinstance(refused, ConnectFailed)
    assert two.submit(TearDownPeer(P.worker, "again")) == []
    assert two.on_event(1, PeerDrained(P)) == [PeerDrained(P)]
    two.take_commands()
    two.connect()


def test_a_drain_proof_before_the_other_rank_s_answer_counts(two: Two) -> None:
    two.connect()
    two.submit(order(1))
    two.on_event(0, failed(1, FailureKind.PEER, "cut", drained=False))
    two.on_event(0, PeerLost(P, False, "cut"))
    assert two.on_event(0, PeerDrained(P)) == []
    assert two.on_event(1, failed(1, FailureKind.TEARDOWN)) == [failed(1, FailureKind.PEER, "cut")]
    assert two.on_event(1, PeerLost(P, True, "cut")) == [PeerLost(P, True, "cut")]


def test_self_tests_are_joined_and_the_first_error_names_its_rank(two: Two) -> None:
    two.submit(SelfTest())
    two.submit(SelfTest())
    assert two.take_commands() == [(0, SelfTest()), (1, SelfTest())]
    two.on_event(0, SelfTestDone(None, 2.0))
    assert two.on_event(1, SelfTestDone("no device", 1.0)) == [SelfTestDone("rank 1: no device", 2.0)]
    two.submit(SetPolling(True))
    assert two.take_commands() == [(0, SetPolling(True)), (1, SetPolling(True))]


def test_reads_of_a_rank_that_vanished_are_not_drained(two: Two) -> None:
    two.connect()
    two.submit(order(1))
    two.submit(SelfTest())
    two.on_event(0, ReadDone(1, 100, 0.1))
    two.on_event(0, SelfTestDone(None, 0.0))
    assert two.on_event(1, TransferStopped("killed")) == [
        failed(1, FailureKind.STOPPED, "killed", drained=False),
        SelfTestDone("rank 1: killed", 0.0),
    ]
    assert two.merger.is_over
    assert two.on_event(0, TransferStopped(None)) == [TransferStopped("rank 1: killed")]


@dataclass
class Rank:
    """A transfer engine of one rank, with the commands and events in flight to and from the merger."""

    transport: ScriptedTransport = field(default_factory=ScriptedTransport)
    inbox: deque[Command] = field(default_factory=deque)
    outbox: deque[Event] = field(default_factory=deque)
    is_gone: bool = False

    def __post_init__(self) -> None:
        self.carrier = TransferEngine(self.transport, digest, ManualClock(), 2 * BLOCK_BYTES)

    @property
    def is_busy(self) -> bool:
        """Return whether commands, events or reads of this rank are open."""
        return not self.is_gone and bool(self.inbox or self.outbox or not self.carrier.is_drained)

    def accept(self) -> None:
        if self.inbox and not self.is_gone:
            self.carrier.accept(self.inbox.popleft())

    def turn(self) -> None:
        if not self.is_gone:
            self.outbox.extend(self.carrier.turn())

    def stop(self, error: str | None = None) -> None:
        """Stop as a transfer thread does: orders in the inbox are answered too."""
        if self.is_gone:
            return
        self.is_gone = True
        for command in self.inbox:
            if isinstance(command, StartRead):
                self.carrier.accept(command)
        self.inbox.clear()
        self.outbox.extend(self.carrier.close(error))

    def vanish(self) -> None:
        """Stop as a killed process does: nothing is answered and the channel breaks."""
        self.is_gone = True
        self.inbox.clear()
        self.outbox.append(TransferStopped("gone"))


class JointMachine(RuleBasedStateMachine):
    """Real transfer engines over scripted transports, with commands and events in any interleaving."""

    @initialize(num=st.integers(1, 3))
    def open(self, num: int) -> None:
        self.ranks = [Rank() for _ in range(num)]
        self.merger = RankEventMerger(num)
        self.incarnations = {"p": 1, "q": 1}
        self.next_id = 0
        self.open_orders: dict[int, TransportPeer] = {}
        self.up: set[TransportPeer] = set()
        self.unsafe: set[TransportPeer] = set()
        self.num_pending: Counter[TransportPeer] = Counter()
        self.end: TransferStopped | None = None

    @property
    def is_serving(self) -> bool:
        return not self.merger.is_over

    def writing(self, peer: TransportPeer, id: int | None = None) -> bool:
        """Whether any rank may still write to blocks of this peer's orders, or of the one with this id."""
        return any(
            life == peer.life and (id is None or any(copy.local // 10 == id for copy in copies))
            for rank in self.ranks
            for life, copies in rank.transport.open.values()
        )

    def work(self) -> None:
        while self.merger.commands or self.merger.events:
            if self.merger.commands:
                number, command = self.merger.commands.popleft()
                if not self.ranks[number].is_gone:
                    self.ranks[number].inbox.append(command)
            else:
                self.take(self.merger.events.popleft())

    def take(self, event: Event) -> None:
        assert self.end is None, "TransferStopped is the last word"
        match event:
            case ReadDone(id) | ReadFailed(id):
                peer = self.open_orders.pop(id)
                assert not any(c.read == id for rank in self.ranks for c in rank.inbox if isinstance(c, StartRead))
                if isinstance(event, ReadDone) or event.drained:
                    assert not self.writing(peer, id)
                else:
                    self.unsafe.add(peer)
            case Connected(peer):
                self.num_pending[peer] -= 1
                self.up.add(peer)
                for rank in self.ranks:
                    is_lost = any(isinstance(e, PeerLost) and e.peer == peer for e in rank.outbox)
                    assert rank.carrier._peers.get(peer.life) == peer or is_lost or rank.is_gone
            case ConnectFailed(peer, reason):
                assert reason
                self.num_pending[peer] -= 1
            case PeerLost(peer, proven):
                assert peer in self.up
                assert peer not in self.open_orders.values(), "its orders were reported before"
                self.up.discard(peer)
                if proven:
                    self.prove(peer)
            case PeerDrained(peer):
                self.prove(peer)
            case TransferStopped():
                self.end = event

    def prove(self, peer: TransportPeer) -> None:
        assert not self.writing(peer)
        self.unsafe.discard(peer)

    def submit(self, command: Command) -> None:
        self.merger.submit(command)
        self.work()

    def peer(self, name: str) -> TransportPeer:
        return peer_named(name, self.incarnations[name])

    @precondition(lambda self: self.is_serving)
    @rule(name=st.sampled_from("pq"), anew=st.booleans())
    def connect(self, name: str, anew: bool) -> None:
        self.incarnations[name] += anew
        self.num_pending[self.peer(name)] += 1
        self.submit(ConnectPeer(self.peer(name)))

    @precondition(lambda self: self.is_serving)
    @rule(name=st.sampled_from("pq"), num=st.integers(0, 5), digests=st.booleans())
    def read(self, name: str, num: int, digests: bool) -> None:
        self.next_id += 1
        self.open_orders[self.next_id] = self.peer(name)
        self.submit(order(self.next_id, num, self.peer(name), digests))

    @precondition(lambda self: self.is_serving)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.open_orders:
            self.submit(Cancel(data.draw(st.sampled_from(sorted(self.open_orders)))))

    @precondition(lambda self: self.is_serving)
    @rule(name=st.sampled_from("pq"))
    def tear_down(self, name: str) -> None:
        self.submit(TearDownPeer(self.peer(name).worker, "test"))

    @rule(data=st.data(), state=st.sampled_from([ReadState.DONE, ReadState.DONE, ReadState.FAILED, None]))
    def end_read(self, data: st.DataObject, state: ReadState | None) -> None:
        """End a read at one rank; a state of None leaves its end uncertain."""
        transport = self.pick_rank(data).transport
        if transport.open:
            handle = data.draw(st.sampled_from(sorted(transport.open)))
            transport.lose_track(handle) if state is None else transport.end(handle, state)

    @rule(data=st.data(), broken=st.booleans())
    def break_posts(self, data: st.DataObject, broken: bool) -> None:
        self.pick_rank(data).transport.post_error = PeerError("broken") if broken else None

    @rule(data=st.data(), broken=st.booleans())
    def break_connections(self, data: st.DataObject, broken: bool) -> None:
        self.pick_rank(data).transport.connect_error = PeerError("no route") if broken else None

    @rule(data=st.data(), num=st.integers(1, 3))
    def let_a_rank_work(self, data: st.DataObject, num: int) -> None:
        rank = self.pick_rank(data)
        for _ in range(num):
            rank.accept()
        rank.turn()

    @rule(data=st.data(), num=st.integers(1, 4))
    def deliver(self, data: st.DataObject, num: int) -> None:
        number = data.draw(st.integers(0, len(self.ranks) - 1))
        for _ in range(min(num, len(self.ranks[number].outbox))):
            self.merger.on_event(number, self.ranks[number].outbox.popleft())
            self.work()

    @precondition(lambda self: self.next_id > 4)
    @rule(data=st.data(), silently=st.booleans())
    def lose_a_rank(self, data: st.DataObject, silently: bool) -> None:
        rank = self.pick_rank(data)
        if not rank.is_gone:
            rank.vanish() if silently else rank.stop("broke")

    def pick_rank(self, data: st.DataObject) -> Rank:
        return data.draw(st.sampled_from(self.ranks))

    def deliver_all(self) -> None:
        for number, rank in enumerate(self.ranks):
            while rank.outbox:
                self.merger.on_event(number, rank.outbox.popleft())
                self.work()

    def teardown(self) -> None:
        if not hasattr(self, "ranks"):
            return
        self.settle()
        if self.is_serving and not any(rank.is_gone for rank in self.ranks):
            assert not self.open_orders, "every read has ended"
            assert not self.unsafe, "and every proof has come"
            assert not +self.num_pending, "every connection was answered"
        for rank in self.ranks:
            rank.stop()
        self.deliver_all()
        assert not self.open_orders
        assert self.end is not None

    def settle(self) -> None:
        """Run until every open read, command and event is finished. Commands that wait for one another take several
        rounds each."""
        for _ in range(MAX_ROUNDS):
            for rank in self.ranks:
                rank.transport.post_error = None
                for handle in list(rank.transport.open):
                    if handle not in rank.transport.ended:
                        rank.transport.end(handle)
                    elif not rank.is_gone:
                        # A read whose end is uncertain: only the transport can prove it.
                        rank.turn()
                        rank.transport.open.pop(handle, None)
                while rank.inbox:
                    rank.accept()
                rank.turn()
            self.deliver_all()
            if not any(rank.is_busy for rank in self.ranks):
                return
        raise AssertionError("the ranks do not come to rest")


TestJointMachine = JointMachine.TestCase
TestJointMachine.settings = effort(80)
