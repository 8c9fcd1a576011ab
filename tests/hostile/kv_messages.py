"""Fuzz targets: the messages by which workers move KV, the check of a peer's memory, the signatures of calls, and the
messages between the ranks of one worker."""

from __future__ import annotations

import numpy as np
from google.protobuf.message import DecodeError

from tandem.core.events import SampledToken
from tandem.core.ids import BlockHash, BlockId, HandoffId, HandoffKey, Incarnation, WorkerId, WorkerRef
from tandem.engine.rank_messages import ClearBlocks, Forward
from tandem.engine.transfer_messages import TransportPeer, TransportRank
from tandem.kv.handoff import Announcement, BlockDigest, RemotePrefixRequest
from tandem.kv.hashing import HASH_BYTES
from tandem.kv.layout import KVGroup, KVLayout
from tandem.transfer.interface import PeerError
from tandem.transfer.peer_layout import check_peer, shares_of
from tandem.transfer.tcp_source import requested_spans
from tandem.wire.call_auth import CallCheck, CallToken, sign_token
from tandem.wire.gen import kv_pb2 as pb
from tandem.wire.kv_codec import (
    decode_announcement,
    decode_handoff_key,
    decode_peer,
    decode_prefix_request,
    decode_worker,
    encode_announcement,
    encode_handoff_key,
    encode_peer,
    encode_prefix_request,
    encode_pull_remainder,
    encode_worker,
)
from tandem.wire.rank_codec import RANK_COMMANDS, RANK_EVENTS
from tandem.wire.worker_codec import decode_kind
from tests.hostile.surface import Surface
from tests.memory_pools import memory_pool

SOURCE = WorkerRef(WorkerId("p1"), Incarnation(9), "127.0.0.1:5000")
_LAYOUT = KVLayout(16, (KVGroup(2, 4, 8, "float32"),))
_POOL = memory_pool(4096, 8, _LAYOUT, heads=range(1, 3))
_RANKS = [memory_pool(4096 * (1 + start), 8, _LAYOUT, heads=range(start, start + 2)).region for start in (0, 2)]
PEER = TransportPeer(
    SOURCE, _LAYOUT, tuple(TransportRank(f"a{index}", b"metadata", region) for index, region in enumerate(_RANKS))
)
_KEY = HandoffKey(HandoffId("h1"), 1)
_PREFIX = RemotePrefixRequest(0, (BlockHash(bytes(HASH_BYTES)), BlockHash(b"\1" * HASH_BYTES)))
_ANNOUNCEMENT = Announcement(
    _KEY, 0, (BlockDigest(BlockId(3), (5, 6)), BlockDigest(BlockId(4), (7, 8))), 32, (SampledToken(5, -0.5),), 16
)


def _read_handoff(data: bytes) -> None:
    """Read bytes after the first as a producer's update or, where the first byte is c, as a consumer's request."""
    if data[:1] == b"c":
        _read_request(pb.StreamHandoffRequest.FromString(data[1:]))
    else:
        _read_update(pb.StreamHandoffUpdate.FromString(data[1:]))


def _read_request(request: pb.StreamHandoffRequest) -> None:
    decode_worker(request.consumer)
    for key in (
        *request.follow,
        *request.renew,
        *request.release,
        *request.taken,
        *(each.key for each in request.take),
    ):
        decode_handoff_key(key)
    for each in request.prefix_request:
        decoded = decode_prefix_request(each)
        assert decode_prefix_request(encode_prefix_request(*decoded)) == decoded


def _read_update(update: pb.StreamHandoffUpdate) -> None:
    for message in update.announcements:
        announcement = decode_announcement(message)
        assert repr(decode_announcement(encode_announcement(announcement))) == repr(announcement)
    for end in update.ended:
        decode_handoff_key(end.key)
        decode_kind(end.kind)


def _read_peer(data: bytes) -> None:
    """Read a worker's description of its memory. The parts of a block that this worker would read lie in the ranks'
    blocks and in its own, and fill its own exactly."""
    peer = decode_peer(pb.TransportPeer.FromString(data))
    check_peer(_POOL, peer)
    shares = sorted(shares_of(_POOL, peer), key=lambda share: share.local_offset)
    end = 0
    for share in shares:
        assert share.local_offset == end and share.remote_offset + share.num_bytes <= share.rank.region.block_bytes
        end += share.num_bytes
    assert end == _POOL.region.block_bytes


_METHOD, _SECRET, _NOW = "/tandem.v1.Worker/Submit", b"s" * 32, 1_800_000_000.0


def _read_signature(data: bytes) -> None:
    """Check a call's signature. Only the seed's own bytes are accepted."""
    fault = CallCheck(Incarnation(9)).judge([data], _METHOD, [_SECRET], _NOW)
    assert (fault is None) == (data == _SIGNATURE)


_SIGNATURE = sign_token(CallToken("g", int(_NOW * 1e3), Incarnation(9), b"n" * 16), _METHOD, _SECRET)


def _read_rank_message(data: bytes) -> None:
    for codec in (RANK_COMMANDS, RANK_EVENTS):
        try:
            codec.decode(data)
        except ValueError:
            continue


def _read_request_for_blocks(data: bytes) -> None:
    """Read offset, number of bytes and runs of blocks, 4 bytes each, as a source of KV over TCP does. What it would
    send lies in its pool."""
    words = np.frombuffer(data[: len(data) // 8 * 8], "<u4")
    if len(words) < 4:
        return
    region = _POOL.region
    for address, num_bytes in requested_spans(region, words[2:], int(words[0]), int(words[1])).tolist():
        assert region.address <= address < address + num_bytes <= region.address + _POOL.num_bytes


SURFACES = {
    "kv-request": Surface(
        read=_read_request_for_blocks,
        seeds=tuple(
            np.array(words, "<u4").tobytes()
            for words in ((0, _POOL.region.block_bytes, 0, 3, 5, 2), (64, 128, 7, 1, 0, 4))
        ),
        errors=(ValueError,),
    ),
    "handoff": Surface(
        read=_read_handoff,
        seeds=(
            b"c"
            + pb.StreamHandoffRequest(
                consumer=encode_worker(SOURCE),
                follow=[encode_handoff_key(_KEY)],
                prefix_request=[encode_prefix_request(_KEY, _PREFIX)],
                take=[encode_pull_remainder(_KEY, 3)],
                sequence=4,
            ).SerializeToString(),
            b"p"
            + pb.StreamHandoffUpdate(
                announcements=[encode_announcement(_ANNOUNCEMENT)], renewed_sequence=3, lease_ms=5000
            ).SerializeToString(),
        ),
        errors=(DecodeError,),
    ),
    "kv-peer": Surface(
        read=_read_peer, seeds=(encode_peer(PEER).SerializeToString(),), errors=(DecodeError, PeerError)
    ),
    "call-signature": Surface(read=_read_signature, seeds=(_SIGNATURE,)),
    "rank-message": Surface(
        read=_read_rank_message,
        seeds=(
            RANK_COMMANDS.encode(Forward(5, 2, 3, 1, 4)),
            RANK_COMMANDS.encode(ClearBlocks((BlockId(3), BlockId(4)))),
        ),
    ),
}
