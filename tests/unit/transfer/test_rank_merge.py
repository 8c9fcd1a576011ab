"""Several ranks as one mover: each order answered once, and nothing said to be over that is open at any rank."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tandem.engine.ports import PeerError, ReadState, TransportPeer
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
from tandem.transfer.rank_merge import RankEventMerger
from tandem.transfer.transfer_engine import TransferEngine
from tests.effort import effort
from tests.unit.transfer.scripted import BLOCK_BYTES, ManualClock, P, Q, ScriptedTransport, digest, order, peer_named


class Two:
    """A joint of two ranks whose answers the test gives."""

    def __init__(self) -> None:
        self.joint = RankEventMerger(2)

    def ask(self, command: Command) -> list[Event]:
        self.joint.submit(command)
        return self.events()

    def heard(self, rank: int, event: Event) -> list[Event]:
        self.joint.on_event(rank, event)
        return self.events()

    def events(self) -> list[Event]:
        events = list(self.joint.events)
        self.joint.events.clear()
        return events

    def told(self) -> list[tuple[int, Command]]:
        commands = list(self.joint.commands)
        self.joint.commands.clear()
        return commands

    def connect(self, peer: TransportPeer = P) -> None:
        assert self.ask(ConnectPeer(peer)) == []
        assert self.heard(0, Connected(peer)) == []
        assert self.heard(1, Connected(peer)) == [Connected(peer)]
        assert self.told() == [(0, ConnectPeer(peer)), (1, ConnectPeer(peer))]


@pytest.fixture
def two() -> Two:
    return Two()


def failed(id: int, kind: FailureKind, reason: str = "", *, drained: bool = True) -> ReadFailed:
    return ReadFailed(id, kind, reason, drained)


def test_an_order_is_done_when_every_rank_has_its_part(two: Two) -> None:
    two.connect()
    read = order(1)
    assert two.ask(read) == two.ask(read) == [], "the same order twice is one"
    assert two.told() == [(0, read), (1, read)]
    assert two.heard(1, ReadDone(1, 100, 0.5)) == []
    assert two.heard(0, ReadDone(1, 100, 0.2)) == [ReadDone(1, 200, 0.5)]


def test_one_rank_that_fails_an_order_ends_it_at_the_others(two: Two) -> None:
    two.connect()
    two.ask(order(1))
    two.told()
    assert two.heard(0, failed(1, FailureKind.DIGEST, "another block")) == []
    assert two.told() == [(1, Cancel(1))]
    assert two.heard(1, failed(1, FailureKind.CANCELLED)) == [failed(1, FailureKind.DIGEST, "another block")]
    two.ask(order(2))
    two.told()
    two.heard(0, ReadDone(2, 100, 0.1))
    assert two.heard(1, failed(2, FailureKind.DIGEST, "x")) == [failed(2, FailureKind.DIGEST, "x")]
    assert two.told() == [], "rank 0 is done with it"


def test_a_cancel_goes_to_the_ranks_that_still_read(two: Two) -> None:
    two.connect()
    two.ask(order(1))
    two.heard(0, ReadDone(1, 100, 0.1))
    two.told()
    two.ask(Cancel(1))
    two.ask(Cancel(99))
    assert two.told() == [(1, Cancel(1))]


def test_a_connection_that_fails_at_one_rank_is_torn_down_at_the_others(two: Two) -> None:
    two.ask(ConnectPeer(P))
    assert two.heard(0, Connected(P)) == []
    two.told()
    assert two.heard(1, ConnectFailed(P, "no route")) == [ConnectFailed(P, "no route")]
    assert two.told() == [(0, TearDownPeer(P, "no route"))]
    assert two.ask(ConnectPeer(P)) == [], "waits for the end of the first"
    assert two.told() == []
    assert two.heard(0, PeerLost(P, True, "no route")) == [], "nobody was told that it was connected"
    assert two.told() == [(0, ConnectPeer(P)), (1, ConnectPeer(P))]
    two.heard(0, Connected(P))
    assert two.heard(1, Connected(P)) == [Connected(P)]
    assert two.ask(ConnectPeer(P)) == [Connected(P)], "once more costs nothing"
    assert two.told() == []


def test_an_order_for_nobody_is_refused(two: Two) -> None:
    two.ask(ConnectPeer(P))
    (event,) = two.ask(order(1))
    assert isinstance(event, ReadFailed)
    assert (event.kind, event.drained) == (FailureKind.REFUSED, True)
    assert two.ask(TearDownPeer(Q, "who?")) == [PeerLost(Q, True, "who?")]


def test_a_peer_that_one_rank_loses_is_lost_when_all_have_given_it_up(two: Two) -> None:
    two.connect()
    two.ask(order(1))
    two.told()
    two.heard(0, failed(1, FailureKind.PEER, "reset"))
    assert two.heard(0, PeerLost(P, True, "reset")) == []
    assert two.told() == [(1, Cancel(1)), (1, TearDownPeer(P, "reset"))]
    assert two.ask(order(2)) == [failed(2, FailureKind.REFUSED, f"{P.worker} is not connected")]
    assert two.heard(1, failed(1, FailureKind.CANCELLED)) == [failed(1, FailureKind.PEER, "reset")]
    assert two.heard(1, PeerLost(P, True, "reset")) == [PeerLost(P, True, "reset")]


def test_the_loss_of_a_peer_waits_for_the_answer_to_an_order_that_came_too_late_at_one_rank(two: Two) -> None:
    two.connect()
    two.ask(order(1))
    two.heard(0, PeerLost(P, True, "reset"))
    two.heard(1, failed(1, FailureKind.TEARDOWN, "reset"))
    assert two.heard(1, PeerLost(P, True, "reset")) == []
    late = failed(1, FailureKind.REFUSED, "not connected")
    assert two.heard(0, late) == [failed(1, FailureKind.TEARDOWN, "reset"), PeerLost(P, True, "reset")]


def test_both_ranks_may_lose_a_peer_at_once(two: Two) -> None:
    """The teardown crosses the loss, and is answered like one of a stranger, even after the next connection began."""
    two.connect()
    two.heard(0, PeerLost(P, True, "reset"))
    assert two.told() == [(1, TearDownPeer(P, "reset"))]
    assert two.heard(1, PeerLost(P, True, "gone")) == [PeerLost(P, True, "reset")]
    two.ask(ConnectPeer(P))
    assert two.heard(1, PeerLost(P, True, "reset")) == [], "late"
    two.heard(1, Connected(P))
    assert two.heard(0, Connected(P)) == [Connected(P)]


def test_what_one_rank_cannot_prove_is_not_proven(two: Two) -> None:
    two.connect()
    two.ask(order(1))
    two.ask(TearDownPeer(P, "slow"))
    two.ask(TearDownPeer(P, "again"))
    two.heard(0, failed(1, FailureKind.TEARDOWN, "slow"))
    two.heard(0, PeerLost(P, True, "slow"))
    slow = failed(1, FailureKind.TEARDOWN, "slow", drained=False)
    assert two.heard(1, slow) == [slow]
    assert two.heard(1, PeerLost(P, False, "slow")) == [PeerLost(P, False, "slow")]
    (refused,) = two.ask(ConnectPeer(P))
    assert isinstance(refused, ConnectFailed)
    assert two.ask(TearDownPeer(P, "again")) == []
    assert two.heard(1, PeerDrained(P)) == [PeerDrained(P)]
    two.told()
    two.connect()


def test_a_proof_that_comes_before_the_other_rank_answers_counts(two: Two) -> None:
    two.connect()
    two.ask(order(1))
    two.heard(0, failed(1, FailureKind.PEER, "cut", drained=False))
    two.heard(0, PeerLost(P, False, "cut"))
    assert two.heard(0, PeerDrained(P)) == []
    assert two.heard(1, failed(1, FailureKind.TEARDOWN)) == [failed(1, FailureKind.PEER, "cut")]
    assert two.heard(1, PeerLost(P, True, "cut")) == [PeerLost(P, True, "cut")]


def test_self_tests_are_joined_and_the_first_error_names_its_rank(two: Two) -> None:
    two.ask(SelfTest())
    two.ask(SelfTest())
    assert two.told() == [(0, SelfTest()), (1, SelfTest())]
    two.heard(0, SelfTestDone(None, 2.0))
    assert two.heard(1, SelfTestDone("no device", 1.0)) == [SelfTestDone("rank 1: no device", 2.0)]
    two.ask(SetPolling(True))
    assert two.told() == [(0, SetPolling(True)), (1, SetPolling(True))]


def test_a_rank_that_is_gone_without_a_word_leaves_its_reads_in_doubt(two: Two) -> None:
    two.connect()
    two.ask(order(1))
    two.ask(SelfTest())
    two.heard(0, ReadDone(1, 100, 0.1))
    two.heard(0, SelfTestDone(None, 0.0))
    assert two.heard(1, TransferStopped("killed")) == [
        failed(1, FailureKind.STOPPED, "killed", drained=False),
        SelfTestDone("rank 1: killed", 0.0),
    ]
    assert two.joint.is_over
    assert two.heard(0, TransferStopped(None)) == [TransferStopped("rank 1: killed")]


@dataclass
class Rank:
    """A carrier of its own, and what is on its way to it and from it."""

    transport: ScriptedTransport = field(default_factory=ScriptedTransport)
    inbox: deque[Command] = field(default_factory=deque)
    outbox: deque[Event] = field(default_factory=deque)
    is_gone: bool = False

    def __post_init__(self) -> None:
        self.carrier = TransferEngine(self.transport, digest, ManualClock(), 2 * BLOCK_BYTES)

    def accept(self) -> None:
        if self.inbox and not self.is_gone:
            self.carrier.accept(self.inbox.popleft())

    def turn(self) -> None:
        if not self.is_gone:
            self.outbox.extend(self.carrier.turn())

    def stop(self, error: str | None = None) -> None:
        """As a mover ends: orders in its inbox are answered, too."""
        if self.is_gone:
            return
        self.is_gone = True
        for command in self.inbox:
            if isinstance(command, ReadRequest):
                self.carrier.accept(command)
        self.inbox.clear()
        self.outbox.extend(self.carrier.close(error))

    def vanish(self) -> None:
        """As a process that is killed behind a channel that breaks."""
        self.is_gone = True
        self.inbox.clear()
        self.outbox.append(TransferStopped("gone"))


class JointMachine(RuleBasedStateMachine):
    """Real carriers over scripted transports, with commands and events that arrive in any interleaving."""

    @initialize(num=st.integers(1, 3))
    def open(self, num: int) -> None:
        self.ranks = [Rank() for _ in range(num)]
        self.joint = RankEventMerger(num)
        self.incarnations = {"p": 1, "q": 1}
        self.next_id = 0
        self.open_orders: dict[int, TransportPeer] = {}
        self.up: set[TransportPeer] = set()
        self.unsafe: set[TransportPeer] = set()
        self.asked: Counter[TransportPeer] = Counter()
        self.teardowns: Counter[TransportPeer] = Counter()
        self.end: TransferStopped | None = None

    @property
    def is_serving(self) -> bool:
        return not self.joint.is_over

    def writing(self, peer: TransportPeer, id: int | None = None) -> bool:
        """Whether any rank may still write to blocks of this peer's orders, or of the one with this id."""
        return any(
            life == peer.life and (id is None or any(copy.local // 10 == id for copy in copies))
            for rank in self.ranks
            for life, copies in rank.transport.open.values()
        )

    def work(self) -> None:
        while self.joint.commands or self.joint.events:
            if self.joint.commands:
                number, command = self.joint.commands.popleft()
                if not self.ranks[number].is_gone:
                    self.ranks[number].inbox.append(command)
            else:
                self.take(self.joint.events.popleft())

    def take(self, event: Event) -> None:
        assert self.end is None, "MoverStopped is the last word"
        match event:
            case ReadDone(id) | ReadFailed(id):
                peer = self.open_orders.pop(id)
                assert not any(c.id == id for rank in self.ranks for c in rank.inbox if isinstance(c, ReadRequest))
                if isinstance(event, ReadDone) or event.drained:
                    assert not self.writing(peer, id)
                else:
                    self.unsafe.add(peer)
            case Connected(peer):
                self.asked[peer] -= 1
                self.up.add(peer)
                for rank in self.ranks:
                    is_lost = any(isinstance(e, PeerLost) and e.peer == peer for e in rank.outbox)
                    assert rank.carrier._peers.get(peer.life) == peer or is_lost or rank.is_gone
            case ConnectFailed(peer, reason):
                assert reason
                self.asked[peer] -= 1
            case PeerLost(peer, proven):
                assert peer in self.up or self.teardowns[peer] > 0
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

    def ask(self, command: Command) -> None:
        self.joint.submit(command)
        self.work()

    def peer(self, name: str) -> TransportPeer:
        return peer_named(name, self.incarnations[name])

    @precondition(lambda self: self.is_serving)
    @rule(name=st.sampled_from("pq"), anew=st.booleans())
    def connect(self, name: str, anew: bool) -> None:
        self.incarnations[name] += anew
        self.asked[self.peer(name)] += 1
        self.ask(ConnectPeer(self.peer(name)))

    @precondition(lambda self: self.is_serving)
    @rule(name=st.sampled_from("pq"), num=st.integers(0, 5), digests=st.booleans())
    def read(self, name: str, num: int, digests: bool) -> None:
        self.next_id += 1
        self.open_orders[self.next_id] = self.peer(name)
        self.ask(order(self.next_id, num, self.peer(name), digests))

    @precondition(lambda self: self.is_serving)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.open_orders:
            self.ask(Cancel(data.draw(st.sampled_from(sorted(self.open_orders)))))

    @precondition(lambda self: self.is_serving)
    @rule(name=st.sampled_from("pq"))
    def tear_down(self, name: str) -> None:
        self.teardowns[self.peer(name)] += 1
        self.ask(TearDownPeer(self.peer(name), "test"))

    @rule(data=st.data(), state=st.sampled_from([ReadState.DONE, ReadState.DONE, ReadState.FAILED, None]))
    def end_read(self, data: st.DataObject, state: ReadState | None) -> None:
        """None: in doubt."""
        transport = self.draw_rank(data).transport
        if transport.open:
            handle = data.draw(st.sampled_from(sorted(transport.open)))
            transport.doubt(handle) if state is None else transport.end(handle, state)

    @rule(data=st.data(), broken=st.booleans())
    def break_posts(self, data: st.DataObject, broken: bool) -> None:
        self.draw_rank(data).transport.post_error = PeerError("broken") if broken else None

    @rule(data=st.data(), broken=st.booleans())
    def break_connections(self, data: st.DataObject, broken: bool) -> None:
        self.draw_rank(data).transport.connect_error = PeerError("no route") if broken else None

    @rule(data=st.data(), num=st.integers(1, 3))
    def let_a_rank_work(self, data: st.DataObject, num: int) -> None:
        rank = self.draw_rank(data)
        for _ in range(num):
            rank.accept()
        rank.turn()

    @rule(data=st.data(), num=st.integers(1, 4))
    def hear(self, data: st.DataObject, num: int) -> None:
        number = data.draw(st.integers(0, len(self.ranks) - 1))
        for _ in range(min(num, len(self.ranks[number].outbox))):
            self.joint.on_event(number, self.ranks[number].outbox.popleft())
            self.work()

    @precondition(lambda self: self.next_id > 4)
    @rule(data=st.data(), silently=st.booleans())
    def lose_a_rank(self, data: st.DataObject, silently: bool) -> None:
        rank = self.draw_rank(data)
        if not rank.is_gone:
            rank.vanish() if silently else rank.stop("broke")

    def draw_rank(self, data: st.DataObject) -> Rank:
        return data.draw(st.sampled_from(self.ranks))

    def hear_all(self) -> None:
        for number, rank in enumerate(self.ranks):
            while rank.outbox:
                self.joint.on_event(number, rank.outbox.popleft())
                self.work()

    def teardown(self) -> None:
        if not hasattr(self, "ranks"):
            return
        self.settle()
        if self.is_serving and not any(rank.is_gone for rank in self.ranks):
            assert not self.open_orders, "every read has ended"
            assert not self.unsafe, "and every proof has come"
            assert not +self.asked, "every connection was answered"
        for rank in self.ranks:
            rank.stop()
        self.hear_all()
        assert not self.open_orders
        assert self.end is not None

    def settle(self) -> None:
        """Let everything that is under way come to its end."""
        for _ in range(12):
            for rank in self.ranks:
                rank.transport.post_error = None
                for handle in list(rank.transport.open):
                    if handle not in rank.transport.ended:
                        rank.transport.end(handle)
                    elif not rank.is_gone:
                        # One in doubt: its end is proven by the transport alone.
                        rank.turn()
                        rank.transport.open.pop(handle, None)
                while rank.inbox:
                    rank.accept()
                rank.turn()
            self.hear_all()


TestJointMachine = JointMachine.TestCase
TestJointMachine.settings = effort(80)
