"""Encode and decode the commands and events of a rank's transfer engine ("mover") as messages of mover.proto.

`None` in place of a command stops the transfer engine. An incomplete or malformed message raises
TandemError(INVALID_REQUEST) and no other exception.
"""

from __future__ import annotations

from tandem.core.ids import BlockId
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
)
from tandem.kv.handoff import BlockDigest
from tandem.wire.gen import mover_pb2 as pb
from tandem.wire.kv_codec import decode_peer, decode_worker, encode_peer, encode_worker, malformed, require

_KINDS = {kind.value: kind for kind in FailureKind}


def encode_command(command: Command | None) -> pb.MoverCommand:
    match command:
        case StartRead():
            return pb.MoverCommand(read=_encode_read(command))
        case ConnectPeer(peer):
            return pb.MoverCommand(connect=encode_peer(peer))
        case Cancel(id):
            return pb.MoverCommand(cancel=id)
        case TearDownPeer(peer, reason):
            return pb.MoverCommand(teardown=pb.TeardownPeer(peer=encode_peer(peer), reason=reason))
        case SetPolling(busy):
            return pb.MoverCommand(busy=busy)
        case SelfTest():
            return pb.MoverCommand(self_test=pb.SelfTest())
        case None:
            return pb.MoverCommand(halt=pb.Halt())


def decode_command(message: pb.MoverCommand) -> Command | None:
    match message.WhichOneof("command"):
        case "read":
            return _decode_read(message.read)
        case "connect":
            return ConnectPeer(decode_peer(message.connect))
        case "cancel":
            return Cancel(message.cancel)
        case "teardown":
            return TearDownPeer(decode_peer(message.teardown.peer), message.teardown.reason)
        case "busy":
            return SetPolling(message.busy)
        case "self_test":
            return SelfTest()
        case "halt":
            return None
        case _:
            raise malformed("a mover command without content")


def _encode_read(read: StartRead) -> pb.ReadOrder:
    message = pb.ReadOrder(
        id=read.read,
        local=read.local,
        logical=read.positions,
        checked=read.is_checked,
        source=encode_worker(read.source),
    )
    for offered in read.offered:
        message.blocks.add(block=offered.block, digests=offered.heads)
    return message


def _decode_read(message: pb.ReadOrder) -> StartRead:
    require(
        len(message.blocks) == len(message.local) == len(message.logical),
        "a read has unequal numbers of remote blocks, local blocks and logical indices",
    )
    require(message.HasField("source"), "a read without a source")
    offered = tuple(BlockDigest(BlockId(block.block), tuple(block.digests)) for block in message.blocks)
    local = tuple(map(BlockId, message.local))
    source = decode_worker(message.source)
    return StartRead(message.id, source, tuple(message.logical), offered, local, message.checked)


def encode_event(event: Event) -> pb.MoverEvent:
    match event:
        case ReadDone(id, num_bytes, seconds):
            return pb.MoverEvent(done=pb.ReadDone(id=id, num_bytes=num_bytes, seconds=seconds))
        case ReadFailed(id, kind, reason, drained):
            return pb.MoverEvent(failed=pb.ReadFailed(id=id, kind=kind.value, reason=reason, drained=drained))
        case Connected(peer):
            return pb.MoverEvent(connected=encode_peer(peer))
        case ConnectFailed(peer, reason):
            return pb.MoverEvent(connect_failed=pb.ConnectFailed(peer=encode_peer(peer), reason=reason))
        case PeerLost(peer, proven, reason):
            return pb.MoverEvent(lost=pb.PeerLost(peer=encode_peer(peer), proven=proven, reason=reason))
        case PeerDrained(peer):
            return pb.MoverEvent(drained=encode_peer(peer))
        case SelfTestDone(error, seconds):
            return pb.MoverEvent(self_test_done=pb.SelfTestDone(error=error, seconds=seconds))
        case TransferStopped(error):
            return pb.MoverEvent(stopped=pb.MoverStopped(error=error))


def decode_event(message: pb.MoverEvent) -> Event:
    match message.WhichOneof("event"):
        case "done":
            return ReadDone(message.done.id, message.done.num_bytes, message.done.seconds)
        case "failed":
            return _decode_failed(message.failed)
        case "connected":
            return Connected(decode_peer(message.connected))
        case "connect_failed":
            return ConnectFailed(decode_peer(message.connect_failed.peer), message.connect_failed.reason)
        case "lost":
            return PeerLost(decode_peer(message.lost.peer), message.lost.proven, message.lost.reason)
        case "drained":
            return PeerDrained(decode_peer(message.drained))
        case "self_test_done":
            test = message.self_test_done
            return SelfTestDone(test.error if test.HasField("error") else None, test.seconds)
        case "stopped":
            return TransferStopped(message.stopped.error if message.stopped.HasField("error") else None)
        case _:
            raise malformed("a mover event without content")


def _decode_failed(message: pb.ReadFailed) -> ReadFailed:
    require(message.kind in _KINDS, f"unknown kind of failure {message.kind!r}")
    return ReadFailed(message.id, _KINDS[message.kind], message.reason, message.drained)
