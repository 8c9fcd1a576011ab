"""Test that commands and events of a rank's transfer engine round-trip or are refused with a typed error."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockId, Incarnation, WorkerId, WorkerRef
from tandem.engine.effects import StartRead
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
    TearDownPeer,
    TransferStopped,
    TransportPeer,
    TransportRank,
)
from tandem.kv.handoff import BlockDigest
from tandem.kv.layout import KVGroup, KVLayout, KVRegion
from tandem.wire.gen import mover_pb2 as pb
from tandem.wire.transfer_codec import decode_command, decode_event, encode_command, encode_event

LAYOUT = KVLayout(16, (KVGroup(2, 4, 8, "float8_e4m3fn"),))
PEER = TransportPeer(
    WorkerRef(WorkerId("w"), Incarnation(3), "h:1"),
    LAYOUT,
    tuple(
        TransportRank(f"w.3.{i}", bytes([i]), KVRegion(4096, 9, 2 * LAYOUT.head_bytes, 2 * i, 2 * i + 2, "cuda:1"))
        for i in range(2)
    ),
)
U64 = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 1e6)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
errors = st.none() | texts


@st.composite
def orders(draw: st.DrawFn) -> StartRead:
    heads = st.lists(U64, max_size=4).map(tuple)
    offered = tuple(draw(st.lists(st.builds(BlockDigest, U64.map(BlockId), heads), max_size=4)))
    num = len(offered)
    positions = tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=num, max_size=num)))
    local = tuple(draw(st.lists(U64.map(BlockId), min_size=num, max_size=num)))
    return StartRead(draw(U64), PEER.worker, positions, offered, local, draw(st.booleans()))


commands: st.SearchStrategy[Command | None] = st.one_of(
    orders(),
    st.just(ConnectPeer(PEER)),
    st.builds(Cancel, U64),
    st.builds(TearDownPeer, st.just(PEER), texts),
    st.builds(SetPolling, st.booleans()),
    st.just(SelfTest()),
    st.none(),
)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(ReadDone, U64, U64, seconds),
    st.builds(ReadFailed, U64, st.sampled_from(FailureKind), texts, st.booleans()),
    st.just(Connected(PEER)),
    st.builds(ConnectFailed, st.just(PEER), texts),
    st.builds(PeerLost, st.just(PEER), st.booleans(), texts),
    st.just(PeerDrained(PEER)),
    st.builds(SelfTestDone, errors, seconds),
    st.builds(TransferStopped, errors),
)


@given(commands)
def test_commands_round_trip(command: Command | None) -> None:
    assert decode_command(pb.MoverCommand.FromString(encode_command(command).SerializeToString())) == command


@given(events)
def test_events_round_trip(event: Event) -> None:
    assert decode_event(pb.MoverEvent.FromString(encode_event(event).SerializeToString())) == event


def spoilt_order(field: str) -> pb.MoverCommand:
    order = StartRead(1, PEER.worker, (0,), (BlockDigest(BlockId(1), (1, 2, 3, 4)),), (BlockId(2),))
    message = encode_command(order)
    message.read.ClearField(field)  # type: ignore[arg-type]  # the stubs know literals only
    return message


@pytest.mark.parametrize("field", ["source", "blocks", "local", "logical"])
def test_an_order_that_lacks_something_is_refused(field: str) -> None:
    with pytest.raises(TandemError, match="malformed message"):
        decode_command(spoilt_order(field))


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (decode_command, pb.MoverCommand()),
        (decode_command, pb.MoverCommand(teardown=pb.TeardownPeer(reason="x"))),
        (decode_event, pb.MoverEvent()),
        (decode_event, pb.MoverEvent(failed=pb.ReadFailed(id=1, kind="bored"))),
        (decode_event, pb.MoverEvent(lost=pb.PeerLost(proven=True))),
    ],
)
def test_incomplete_messages_are_refused(decode: Any, message: Any) -> None:
    with pytest.raises(TandemError, match="malformed message"):
        decode(message)


@given(st.binary(max_size=64))
def test_garbage_is_a_typed_error_or_a_lawful_value(garbage: bytes) -> None:
    for of, decode in ((pb.MoverCommand, decode_command), (pb.MoverEvent, decode_event)):
        try:
            decode(of.FromString(garbage))  # type: ignore[operator]  # each with its own message
        except DecodeError:
            continue
        except TandemError as error:
            assert error.kind is ErrorKind.INVALID_REQUEST
