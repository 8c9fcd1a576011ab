"""Test that rank commands and events round-trip, and that malformed bytes are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import ErrorKind
from tandem.core.ids import BlockId, HostSlot, Incarnation, WorkerId, WorkerRef
from tandem.engine.effects import StartRead, TearDownPeer
from tandem.engine.rank_messages import (
    AgentCommand,
    ClearBlocks,
    CopyBlocks,
    DigestBlocks,
    Forward,
    GroupCommand,
    Loaded,
    Logits,
    RankCommand,
    RankEvent,
    RankFailed,
    RankReady,
    RankRefused,
    RankRegistered,
    StartJoining,
    StartTransfer,
    StopTransfer,
    StoreEntry,
)
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
    TransportRank,
)
from tandem.kv.handoff import BlockDigest
from tandem.kv.layout import KVGroup, KVLayout, KVRegion
from tandem.wire.rank_codec import RANK_COMMANDS, RANK_EVENTS, MessageCodec

WORKER = WorkerRef(WorkerId("w"), Incarnation(7), "127.0.0.1:1")
LAYOUT = KVLayout(16, (KVGroup(3, 4, 32, "float32"),))
REGION = KVRegion(1 << 20, 10, LAYOUT.block_bytes // 2, 2, 4)
PEER = TransportPeer(WORKER, LAYOUT, (TransportRank("w.7.1", b"where", REGION),))
COMMANDS: list[RankCommand | AgentCommand | GroupCommand] = [
    StartJoining(),
    RankRefused("other settings"),
    StoreEntry("0/1", b"\xff\0"),
    CopyBlocks(
        ((BlockId(0), HostSlot(5)), (BlockId(1), HostSlot(6))),
        ((HostSlot(5), BlockId(0)),),
        ((BlockId(2), BlockId(3)),),
    ),
    ClearBlocks((BlockId(0), BlockId(2**31))),
    DigestBlocks(4),
    Forward(num_rows=9, num_sequences=4, num_blocks=3, num_decodes=2, max_rows=5),
    Logits(0),
    StopTransfer(),
    StartTransfer(WORKER),
]
EVENTS: list[RankEvent] = [
    RankReady(1, {"version": "1"}),
    StoreEntry("", b""),
    Loaded("ab"),
    RankFailed(ErrorKind.MODEL_NOT_FOUND, "no"),
    RankRegistered(PEER),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: type(c).__name__)
def test_rank_commands(command: RankCommand | AgentCommand | GroupCommand) -> None:
    assert RANK_COMMANDS.decode(RANK_COMMANDS.encode(command)) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_rank_events(event: RankEvent) -> None:
    assert RANK_EVENTS.decode(RANK_EVENTS.encode(event)) == event


U64 = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 1e6)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
errors = st.none() | texts


@st.composite
def reads(draw: st.DrawFn) -> StartRead:
    heads = st.lists(U64, max_size=4).map(tuple)
    offered = tuple(draw(st.lists(st.builds(BlockDigest, U64.map(BlockId), heads), max_size=4)))
    same = {"min_size": len(offered), "max_size": len(offered)}
    positions = tuple(draw(st.lists(st.integers(0, 2**32 - 1), **same)))
    local = tuple(draw(st.lists(U64.map(BlockId), **same)))
    return StartRead(draw(U64), WORKER, positions, offered, local, draw(st.booleans()))


commands: st.SearchStrategy[Command] = st.one_of(
    reads(),
    st.just(ConnectPeer(PEER)),
    st.builds(Cancel, U64),
    st.builds(TearDownPeer, st.just(WORKER), texts),
    st.builds(SetPolling, st.booleans()),
    st.just(SelfTest()),
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
def test_transfer_commands_round_trip(command: Command) -> None:
    assert RANK_COMMANDS.decode(RANK_COMMANDS.encode(command)) == command


@given(events)
def test_transfer_events_round_trip(event: Event) -> None:
    assert RANK_EVENTS.decode(RANK_EVENTS.encode(event)) == event


READ = StartRead(1, WORKER, (0,), (BlockDigest(BlockId(1), (1, 2, 3, 4)),), (BlockId(2),))
ALL = (RANK_COMMANDS, RANK_EVENTS)


@pytest.mark.parametrize("field", ["read", "source", "positions", "offered", "local"])
def test_a_read_that_lacks_something_is_refused(field: str) -> None:
    name, fields = msgspec.msgpack.decode(RANK_COMMANDS.encode(READ))
    without = {key: value for key, value in fields.items() if key != field}
    with pytest.raises(ValueError, match=rf"malformed message of a rank.*{field}"):
        RANK_COMMANDS.decode(msgspec.msgpack.encode((name, without)))
    if field in ("positions", "offered", "local"):
        with pytest.raises(ValueError, match=r"malformed message of a rank.*blocks with"):
            RANK_COMMANDS.decode(msgspec.msgpack.encode((name, {**fields, field: []})))


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (RANK_COMMANDS, ("CopyBlocks", {"spills": [], "fills": [], "copies": [[1]]})),
        (RANK_COMMANDS, ("RankReady", {"rank": 1})),
        (RANK_EVENTS, ("RankFailed", {"kind": "?", "message": ""})),
        (RANK_COMMANDS, ("TearDownPeer", {"reason": "x"})),
        (RANK_EVENTS, ("ReadFailed", {"id": 1, "kind": "bored", "reason": "", "drained": True})),
        (RANK_EVENTS, ("ReadDone", {"id": "1", "num_bytes": 1, "seconds": 1.0})),
    ],
)
def test_unlawful_messages_are_refused(codec: MessageCodec[Any], message: tuple[str, dict[str, object]]) -> None:
    with pytest.raises(ValueError, match="malformed message of a rank"):
        codec.decode(msgspec.msgpack.encode(message))


@given(st.binary(max_size=64))
def test_garbage_is_an_error(garbage: bytes) -> None:
    for codec in ALL:
        with pytest.raises(ValueError, match="malformed message of a rank"):
            codec.decode(garbage)
