"""Test the transfer engine with a scripted transport: every order is reported once, and `drained` only if true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tandem.core.ids import BlockId
from tandem.engine.effects import TearDownPeer
from tandem.engine.transfer_messages import (
    Cancel,
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
)
from tandem.transfer.interface import PeerError, ReadState
from tandem.transfer.peer_layout import CopyRefused
from tandem.transfer.transfer_engine import TransferEngine
from tests.effort import effort
from tests.unit.transfer.scripted import (
    BLOCK_BYTES,
    ManualClock,
    P,
    Q,
    ScriptedTransport,
    copies_of,
    digest,
    order,
    peer_named,
    with_digests,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def transport() -> ScriptedTransport:
    return ScriptedTransport()


@pytest.fixture
def carrier(transport: ScriptedTransport, clock: ManualClock) -> TransferEngine:
    carrier = TransferEngine(transport, digest, clock, max_post_bytes=2 * BLOCK_BYTES)
    carrier.accept(ConnectPeer(P))
    assert carrier.turn() == [Connected(P)]
    return carrier


def run(carrier: TransferEngine, turns: int = 20) -> list[Event]:
    return [event for _ in range(turns) for event in carrier.turn()]


def test_an_order_goes_out_in_parts_two_at_a_time_and_is_reported_once(carrier, transport, clock) -> None:
    clock.time = 5.0
    carrier.accept(order(1, num_blocks=5))
    assert run(carrier) == []
    assert [len(part) for part in transport.posted] == [2, 2]
    clock.time = 6.5
    transport.end(2)
    assert run(carrier) == []
    transport.end(1)
    transport.end(3)
    assert run(carrier) == [ReadDone(1, 5 * BLOCK_BYTES, 1.5)]
    assert sum(transport.posted, ()) == copies_of(order(1, num_blocks=5))
    assert run(carrier) == []


def test_orders_take_turns(carrier, transport) -> None:
    carrier.accept(order(1, num_blocks=8))
    carrier.accept(order(2, num_blocks=8))
    run(carrier)
    assert [part[0].local // 10 for part in transport.posted] == [1, 2, 1, 2]


def test_copies_are_read_by_rising_remote_block_and_checked_at_their_place(carrier, transport) -> None:
    good = order(1, num_blocks=4, digests=True)
    falling = replace(good, offered=good.offered[::-1], local=good.local[::-1], positions=good.positions[::-1])
    carrier.accept(falling)
    carrier.accept(replace(falling, read=2, positions=good.positions))
    run(carrier)
    assert sum(transport.posted[::2], ()) == copies_of(good)
    for handle in list(transport.open):
        transport.end(handle)
    done, failed = run(carrier)
    assert done == ReadDone(1, 4 * BLOCK_BYTES, 0.0)
    assert isinstance(failed, ReadFailed)
    assert failed.kind is FailureKind.DIGEST


def test_an_order_of_nothing_is_done(carrier) -> None:
    carrier.accept(order(1, num_blocks=0))
    assert run(carrier) == [ReadDone(1, 0, 0.0)]


def test_polling_is_fast_only_while_something_is_open(carrier, transport) -> None:
    assert not carrier.is_busy
    carrier.accept(order(1, num_blocks=8))
    assert carrier.is_busy
    assert carrier.has_ready_work
    run(carrier)
    assert carrier.is_busy
    assert not carrier.has_ready_work, "what is left waits for the peer"
    carrier.accept(Cancel(1))
    for handle in list(transport.open):
        transport.end(handle)
    run(carrier)
    assert not carrier.is_busy
    carrier.accept(SetPolling(True))
    assert carrier.is_busy
    assert transport.num_progress > 0


def test_the_digest_is_checked_before_the_report(carrier, transport) -> None:
    carrier.accept(order(1, num_blocks=2, digests=True))
    run(carrier)
    transport.end(1)
    assert run(carrier) == [ReadDone(1, 2 * BLOCK_BYTES, 0.0)]


@pytest.mark.parametrize("wrong", range(4))
def test_one_wrong_block_fails_the_order_and_not_the_peer(carrier, transport, wrong: int) -> None:
    good = order(1, num_blocks=4, digests=True)
    bad = [(0,) if i == wrong else offered.heads for i, offered in enumerate(good.offered)]
    carrier.accept(with_digests(good, bad))
    run(carrier)
    for handle in (1, 2):
        transport.end(handle)
    (event,) = run(carrier)
    assert isinstance(event, ReadFailed)
    assert (event.id, event.kind, event.drained) == (1, FailureKind.DIGEST, True)
    assert f"prompt block {wrong}" in event.reason
    carrier.accept(order(2))
    run(carrier)
    transport.end(3)
    assert run(carrier) == [ReadDone(2, BLOCK_BYTES, 0.0)]


def test_a_digest_failure_waits_for_the_parts_that_are_still_open(carrier, transport) -> None:
    good = order(1, num_blocks=4, digests=True)
    carrier.accept(with_digests(good, [(0,)] * 4))
    run(carrier)
    transport.end(1)
    assert run(carrier) == [], "part 2 may still write"
    transport.end(2)
    (event,) = run(carrier)
    assert isinstance(event, ReadFailed)
    assert event.drained


def test_while_it_reads_a_carrier_leaves_checks_to_its_helper(carrier, transport) -> None:
    carrier.accept(order(1, num_blocks=4, digests=True))
    run(carrier)
    transport.end(1)
    run(carrier)
    assert carrier.checks.may_work
    assert carrier.has_ready_work
    carrier.checks.work()
    assert not carrier.checks.may_work
    transport.end(2)
    assert run(carrier) == [ReadDone(1, 4 * BLOCK_BYTES, 0.0)], "nothing is left to read: it checks the rest itself"


def test_the_helper_is_woken_just_before_a_post(carrier, transport) -> None:
    shared: list[bool] = []
    transport.on_post = lambda: shared.append(carrier.checks.may_work)
    carrier.accept(order(1, num_blocks=8, digests=True))
    run(carrier)
    transport.end(1)
    carrier.turn()
    assert not carrier.checks.may_work, "what else this turn does would compete with it for the interpreter"
    assert carrier.has_ready_work
    carrier.turn()
    assert shared == [False, False, True]


def test_nothing_is_reported_before_the_helper_is_done(carrier, transport) -> None:
    good = order(1, num_blocks=4, digests=True)
    carrier.accept(with_digests(good, [(0,)] * 4))
    run(carrier)
    transport.end(1)
    run(carrier)
    check = carrier.checks._waiting.get()
    transport.end(2)
    assert run(carrier) == [], "the helper has taken the first check"
    assert not carrier.is_drained
    assert not carrier.has_ready_work
    carrier.checks._do(check)
    (event,) = run(carrier)
    assert isinstance(event, ReadFailed)
    assert event.kind is FailureKind.DIGEST
    assert carrier.is_drained


def test_a_digest_that_breaks_in_the_helper_breaks_the_carrier(transport, clock) -> None:
    def broken(blocks: Sequence[BlockId], logical: Sequence[int]) -> list[tuple[int, ...]]:
        raise ValueError("no such block")

    carrier = TransferEngine(transport, broken, clock, max_post_bytes=2 * BLOCK_BYTES)
    carrier.accept(ConnectPeer(P))
    carrier.accept(order(1, num_blocks=4, digests=True))
    run(carrier)
    transport.end(1)
    run(carrier)
    carrier.checks.work()
    with pytest.raises(ValueError, match="no such block"):
        run(carrier)


def test_a_cancelled_order_posts_nothing_more_and_ends_when_its_parts_have(carrier, transport) -> None:
    carrier.accept(order(1, num_blocks=8))
    run(carrier)
    carrier.accept(Cancel(1))
    carrier.accept(Cancel(1))
    carrier.accept(Cancel(99))
    assert run(carrier) == []
    for handle in (1, 2):
        transport.end(handle)
    assert run(carrier) == [ReadFailed(1, FailureKind.CANCELLED, "cancelled", drained=True)]
    assert len(transport.posted) == 2


def test_a_read_that_never_ends_costs_the_peer_and_its_blocks_stay_unsafe_until_the_proof(carrier, transport) -> None:
    carrier.accept(order(1, num_blocks=2))
    carrier.accept(ConnectPeer(Q))
    carrier.accept(order(2, peer=Q))
    run(carrier)
    carrier.accept(TearDownPeer(P.worker, "too slow"))
    carrier.accept(TearDownPeer(P.worker, "again"))
    assert run(carrier) == [
        ReadFailed(1, FailureKind.TEARDOWN, "too slow", drained=False),
        PeerLost(P, False, "too slow"),
    ]
    transport.end(2)
    assert run(carrier) == [ReadDone(2, BLOCK_BYTES, 0.0)], "others are unharmed"
    transport.end(1)
    assert run(carrier) == [PeerDrained(P)]
    assert run(carrier) == []


def test_an_order_with_nothing_open_is_drained_even_when_its_peer_is_not(carrier, transport) -> None:
    carrier.accept(order(1, num_blocks=2))
    run(carrier)
    carrier.accept(order(2))
    carrier.accept(TearDownPeer(P.worker, "slow"))
    assert run(carrier) == [
        ReadFailed(1, FailureKind.TEARDOWN, "slow", drained=False),
        ReadFailed(2, FailureKind.TEARDOWN, "slow", drained=True),
        PeerLost(P, False, "slow"),
    ]


def test_a_teardown_of_an_unknown_peer_does_nothing(carrier) -> None:
    carrier.accept(TearDownPeer(Q.worker, "unknown"))
    assert run(carrier) == []


def test_an_order_after_a_teardown_is_refused(carrier) -> None:
    carrier.accept(TearDownPeer(P.worker, "bye"))
    carrier.accept(order(1))
    lost, refused = run(carrier)
    assert lost == PeerLost(P, True, "bye")
    assert isinstance(refused, ReadFailed)
    assert (refused.kind, refused.drained) == (FailureKind.REFUSED, True)


def test_a_doubled_order_is_reported_once_and_its_id_may_return(carrier, transport) -> None:
    carrier.accept(order(1))
    carrier.accept(order(1))
    run(carrier)
    assert len(transport.posted) == 1
    transport.end(1)
    assert run(carrier) == [ReadDone(1, BLOCK_BYTES, 0.0)]
    carrier.accept(order(1))
    run(carrier)
    transport.end(2)
    assert run(carrier) == [ReadDone(1, BLOCK_BYTES, 0.0)]


def test_an_error_at_the_post_costs_the_peer(carrier, transport) -> None:
    carrier.accept(order(1))
    carrier.accept(order(2))
    transport.post_error = PeerError("reset")
    assert run(carrier) == [
        ReadFailed(1, FailureKind.PEER, "reset", drained=True),
        ReadFailed(2, FailureKind.PEER, "reset", drained=True),
        PeerLost(P, True, "reset"),
    ]


def test_a_post_error_that_proves_nothing_leaves_the_order_undrained(carrier, transport) -> None:
    carrier.accept(order(1))
    transport.post_error = PeerError("half of it went out")
    transport.open[77] = (P.life, ())
    assert run(carrier) == [
        ReadFailed(1, FailureKind.PEER, "half of it went out", drained=False),
        PeerLost(P, False, "half of it went out"),
    ]
    del transport.open[77]
    assert run(carrier) == [PeerDrained(P)]


def test_a_block_that_does_not_exist_fails_its_order_alone(carrier, transport) -> None:
    carrier.accept(order(1))
    run(carrier)
    transport.post_error = CopyRefused("no block 1000")
    carrier.accept(order(2))
    assert run(carrier) == [ReadFailed(2, FailureKind.REFUSED, "no block 1000", drained=True)]
    transport.end(1)
    assert run(carrier) == [ReadDone(1, BLOCK_BYTES, 0.0)]


def test_a_failed_read_costs_the_peer_with_all_its_reads(carrier, transport) -> None:
    for id in (1, 2, 3):
        carrier.accept(order(id))
    run(carrier)
    for handle in (1, 2, 3):
        transport.end(handle, ReadState.FAILED)
    events = run(carrier)
    assert [(e.id, e.kind, e.drained) for e in events if isinstance(e, ReadFailed)] == [
        (id, FailureKind.PEER, True) for id in (1, 2, 3)
    ]
    assert isinstance(events[-1], PeerLost)
    assert events[-1].proven
    assert len(events) == 4


def test_a_read_with_an_uncertain_end_is_not_drained(carrier, transport) -> None:
    carrier.accept(order(1))
    run(carrier)
    transport.lose_track(1)
    failed, lost = run(carrier)
    assert failed == ReadFailed(1, FailureKind.PEER, "in doubt", drained=False)
    assert lost == PeerLost(P, False, "in doubt")


def test_a_new_incarnation_ends_the_old_one_first(carrier, transport) -> None:
    young = peer_named("p", 2)
    carrier.accept(order(1))
    run(carrier)
    carrier.accept(ConnectPeer(young))
    failed, lost, connected = run(carrier)
    assert isinstance(failed, ReadFailed)
    assert not failed.drained
    assert isinstance(lost, PeerLost)
    assert connected == Connected(young)
    carrier.accept(order(2, peer=young))
    run(carrier)
    transport.end(2)
    assert run(carrier) == [ReadDone(2, BLOCK_BYTES, 0.0)]
    carrier.accept(ConnectPeer(P))
    (late,) = run(carrier)
    assert isinstance(late, ConnectFailed)


def test_a_peer_that_restarts_after_its_clock_was_set_back_is_connected_once_its_former_life_is_over(carrier) -> None:
    """An incarnation is a time of the peer's clock, so the later one may be the smaller one."""
    former, later = peer_named("q", 2), peer_named("q", 1)
    carrier.accept(ConnectPeer(former))
    carrier.accept(TearDownPeer(former.worker, "its process has ended"))
    assert run(carrier) == [Connected(former), PeerLost(former, True, "its process has ended")]
    carrier.accept(ConnectPeer(later))
    assert run(carrier) == [Connected(later)]


def test_a_refused_connection_is_reported_and_may_be_tried_again(carrier, transport) -> None:
    transport.connect_error = PeerError("no route")
    carrier.accept(ConnectPeer(Q))
    assert run(carrier) == [ConnectFailed(Q, "no route")]
    transport.connect_error = None
    carrier.accept(ConnectPeer(Q))
    carrier.accept(ConnectPeer(Q))
    assert run(carrier) == [Connected(Q), Connected(Q)]


def test_close_reports_all_that_is_open(carrier, transport) -> None:
    carrier.accept(order(1))
    carrier.accept(ConnectPeer(Q))
    carrier.accept(order(2, peer=Q))
    run(carrier)
    carrier.accept(TearDownPeer(Q.worker, "slow"))
    run(carrier)
    reason = "the transfer thread was stopped"
    assert carrier.close() == [
        ReadFailed(1, FailureKind.STOPPED, reason, drained=True),
        PeerDrained(Q),
        TransferStopped(None),
    ]


def test_a_close_that_fails_proves_nothing(carrier, transport) -> None:
    carrier.accept(order(1))
    run(carrier)
    carrier.accept(order(2))
    transport.close_error = RuntimeError("still in use")
    assert carrier.close() == [
        ReadFailed(1, FailureKind.STOPPED, "still in use", drained=False),
        ReadFailed(2, FailureKind.STOPPED, "still in use", drained=True),
        TransferStopped("still in use"),
    ]


def test_the_self_test_is_answered(carrier, transport, clock) -> None:
    transport.test_state = ReadState.PENDING
    carrier.accept(SelfTest())
    carrier.accept(SelfTest())
    assert run(carrier) == []
    clock.time = 2.0
    transport.test_state = ReadState.DONE
    assert run(carrier) == [SelfTestDone(None, 2.0)]
    transport.test_state = ReadState.FAILED
    carrier.accept(SelfTest())
    (failed,) = run(carrier)
    assert isinstance(failed, SelfTestDone)
    assert failed.error is not None
    transport.post_error = PeerError("no device")
    carrier.accept(SelfTest())
    assert run(carrier) == [SelfTestDone("no device", 0.0)]


class CarrierMachine(RuleBasedStateMachine):
    """Random orders, ends, uncertain ends and teardowns: nothing is reported twice, and `drained` is always true."""

    def __init__(self) -> None:
        super().__init__()
        self.transport = ScriptedTransport()
        self.carrier = TransferEngine(self.transport, digest, ManualClock(), 2 * BLOCK_BYTES)
        self.next_id = 0
        self.open_orders: set[int] = set()
        self.unsafe: dict[str, set[int]] = {}
        self.incarnations = {"p": 1, "q": 1}

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ReadDone | ReadFailed):
                self.open_orders.remove(event.id)
                drained = isinstance(event, ReadDone) or event.drained
                writing = {copy.local // 10 for _, copies in self.transport.open.values() for copy in copies}
                assert drained is False or event.id not in writing
            if isinstance(event, PeerDrained):
                assert event.peer.life not in {life for life, _ in self.transport.open.values()}

    @rule(name=st.sampled_from("pq"), anew=st.booleans())
    def connect(self, name: str, anew: bool) -> None:
        self.incarnations[name] += anew
        self.carrier.accept(ConnectPeer(peer_named(name, self.incarnations[name])))

    @rule(name=st.sampled_from("pq"), num=st.integers(0, 9), digests=st.booleans())
    def read(self, name: str, num: int, digests: bool) -> None:
        self.next_id += 1
        self.open_orders.add(self.next_id)
        peer = peer_named(name, self.incarnations[name])
        self.carrier.accept(order(self.next_id, num, peer, digests))

    @rule(data=st.data(), state=st.sampled_from([ReadState.DONE, ReadState.DONE, ReadState.FAILED]))
    def end(self, data: st.DataObject, state: ReadState) -> None:
        if self.transport.open:
            self.transport.end(data.draw(st.sampled_from(sorted(self.transport.open))), state)

    @rule(data=st.data())
    def lose_track(self, data: st.DataObject) -> None:
        if self.transport.open:
            self.transport.lose_track(data.draw(st.sampled_from(sorted(self.transport.open))))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.open_orders:
            self.carrier.accept(Cancel(data.draw(st.sampled_from(sorted(self.open_orders)))))

    @rule(name=st.sampled_from("pq"))
    def tear_down(self, name: str) -> None:
        self.carrier.accept(TearDownPeer(peer_named(name, self.incarnations[name]).worker, "test"))

    @rule(broken=st.booleans())
    def break_posts(self, broken: bool) -> None:
        self.transport.post_error = PeerError("broken") if broken else None

    @rule()
    def turn(self) -> None:
        self.take(self.carrier.turn())

    @rule()
    def help(self) -> None:
        self.carrier.checks.work()

    @invariant()
    def parts_are_capped(self) -> None:
        assert all(len(copies) <= 2 for copies in self.transport.posted)

    def teardown(self) -> None:
        self.take(self.carrier.close())
        assert not self.open_orders, "every order was reported"


TestCarrierMachine = CarrierMachine.TestCase
TestCarrierMachine.settings = effort(60, steps=40)
