"""Encode and decode the commands and events of tensor-parallel ranks as messages of rank.proto."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError

from tandem.core.errors import ErrorKind
from tandem.core.ids import BlockId, HostSlot
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
from tandem.wire.gen import rank_pb2 as pb
from tandem.wire.kv_codec import decode_peer, decode_worker, encode_peer, encode_worker

_Message = TypeVar("_Message", pb.RankCommand, pb.RankEvent)


def encode_command(command: RankCommand | AgentCommand) -> bytes:
    return _command(command).SerializeToString()


def decode_command(data: bytes) -> RankCommand | AgentCommand:
    """Decode a command. Raises ValueError or TandemError for malformed bytes."""
    message = _parsed(pb.RankCommand(), data)
    match message.WhichOneof("command"):
        case "spill":
            return SpillBlocks(tuple((BlockId(a), HostSlot(b)) for a, b in _pairs(message.spill)))
        case "fill":
            return FillBlocks(tuple((HostSlot(a), BlockId(b)) for a, b in _pairs(message.fill)))
        case "copy":
            return CopyBlocks(tuple((BlockId(a), BlockId(b)) for a, b in _pairs(message.copy)))
        case "clear":
            return ClearBlocks(tuple(map(BlockId, message.clear.blocks)))
        case "digest":
            return DigestBlocks(message.digest.num_blocks)
        case "forward":
            shape = message.forward
            sizes = (shape.num_rows, shape.num_sequences, shape.num_blocks)
            return Forward(*sizes, num_decodes=shape.num_decodes, max_rows=shape.max_rows)
        case "logits":
            return Logits(message.logits)
        case "mover":
            return MoverBytes(message.mover)
        case "open_mover":
            return OpenMover(decode_worker(message.open_mover))
        case _:
            raise ValueError("a rank command without content")


def encode_event(event: RankEvent) -> bytes:
    return _event(event).SerializeToString()


def decode_event(data: bytes) -> RankEvent:
    """Decode an event. Raises ValueError or TandemError for malformed bytes."""
    message = _parsed(pb.RankEvent(), data)
    match message.WhichOneof("event"):
        case "joining":
            return RankReady(message.joining)
        case "loaded":
            return Loaded(message.loaded)
        case "failed":
            return RankFailed(ErrorKind(message.failed.kind), message.failed.message)
        case "mover":
            return MoverBytes(message.mover)
        case "readable":
            return RankRegistered(decode_peer(message.readable))
        case _:
            raise ValueError("a rank event without content")


def _command(command: RankCommand | AgentCommand) -> pb.RankCommand:
    match command:
        case SpillBlocks(spills):
            return pb.RankCommand(spill=_copies(spills))
        case FillBlocks(fills):
            return pb.RankCommand(fill=_copies(fills))
        case CopyBlocks(copies):
            return pb.RankCommand(copy=_copies(copies))
        case ClearBlocks(blocks):
            return pb.RankCommand(clear=pb.ClearBlocks(blocks=blocks))
        case DigestBlocks(num_blocks):
            return pb.RankCommand(digest=pb.DigestBlocks(num_blocks=num_blocks))
        case Forward():
            shape = pb.ForwardBatch(
                num_rows=command.num_rows,
                num_sequences=command.num_sequences,
                num_blocks=command.num_blocks,
                num_decodes=command.num_decodes,
                max_rows=command.max_rows,
            )
            return pb.RankCommand(forward=shape)
        case Logits(num_rows):
            return pb.RankCommand(logits=num_rows)
        case MoverBytes(data):
            return pb.RankCommand(mover=data)
        case OpenMover(worker):
            return pb.RankCommand(open_mover=encode_worker(worker))


def _event(event: RankEvent) -> pb.RankEvent:
    match event:
        case RankReady(rank):
            return pb.RankEvent(joining=rank)
        case Loaded(num_blocks):
            return pb.RankEvent(loaded=num_blocks)
        case RankFailed(kind, message):
            return pb.RankEvent(failed=pb.RankFailure(kind=kind.value, message=message))
        case MoverBytes(data):
            return pb.RankEvent(mover=data)
        case RankRegistered(peer):
            return pb.RankEvent(readable=encode_peer(peer))


def _copies(pairs: Sequence[tuple[int, int]]) -> pb.BlockCopies:
    return pb.BlockCopies(sources=[a for a, _ in pairs], targets=[b for _, b in pairs])


def _pairs(copies: pb.BlockCopies) -> list[tuple[int, int]]:
    """Return (source, target) pairs. Raises ValueError if the numbers of sources and targets differ."""
    return list(zip(copies.sources, copies.targets, strict=True))


def _parsed(message: _Message, data: bytes) -> _Message:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(f"not a rank message: {error}") from None
    return message
