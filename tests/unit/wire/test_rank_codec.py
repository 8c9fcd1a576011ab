"""Test that rank commands and events round-trip, and that malformed bytes are refused."""

from __future__ import annotations

import pytest

from tandem.core.errors import ErrorKind
from tandem.core.ids import BlockId, HostSlot, Incarnation, WorkerId, WorkerRef
from tandem.engine.rank_messages import (
    AgentCommand,
    ClearBlocks,
    CopyBlocks,
    DigestBlocks,
    FillBlocks,
    Forward,
    Loaded,
    Logits,
    MoverBytes,
    OpenMover,
    RankCommand,
    RankEvent,
    RankFailed,
    RankReady,
    RankRegistered,
    SpillBlocks,
)
from tandem.engine.transfer_messages import TransportPeer, TransportRank
from tandem.kv.layout import KVGroup, KVLayout, KVRegion
from tandem.wire.gen import rank_pb2 as pb
from tandem.wire.rank_codec import decode_command, decode_event, encode_command, encode_event

WORKER = WorkerRef(WorkerId("w"), Incarnation(7), "127.0.0.1:1")
LAYOUT = KVLayout(16, (KVGroup(3, 4, 32, "float32"),))
REGION = KVRegion(1 << 20, 10, LAYOUT.block_bytes // 2, 2, 4)
PEER = TransportPeer(WORKER, LAYOUT, (TransportRank("w.7.1", b"where", REGION),))
COMMANDS: list[RankCommand | AgentCommand] = [
    SpillBlocks(((BlockId(0), HostSlot(5)), (BlockId(1), HostSlot(6)))),
    FillBlocks(((HostSlot(5), BlockId(0)),)),
    CopyBlocks(((BlockId(2), BlockId(3)),)),
    ClearBlocks((BlockId(0), BlockId(2**31))),
    DigestBlocks(4),
    Forward(num_rows=9, num_sequences=4, num_blocks=3, num_decodes=2, max_rows=5),
    Logits(0),
    MoverBytes(b""),
    OpenMover(WORKER),
]
EVENTS: list[RankEvent] = [
    RankReady(1),
    Loaded(0),
    RankFailed(ErrorKind.MODEL_NOT_FOUND, "no"),
    MoverBytes(b"\x00"),
    RankRegistered(PEER),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: type(c).__name__)
def test_commands(command: RankCommand | AgentCommand) -> None:
    assert decode_command(encode_command(command)) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_events(event: RankEvent) -> None:
    assert decode_event(encode_event(event)) == event


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", pb.RankCommand(copy=pb.BlockCopies(sources=[1], targets=[])).SerializeToString()],
    ids=["nothing", "garbage", "unequal"],
)
def test_malformed_commands_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_command(data)


@pytest.mark.parametrize("data", [b"", b"\xff", pb.RankEvent(failed=pb.RankFailure(kind="?")).SerializeToString()])
def test_malformed_events_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_event(data)
