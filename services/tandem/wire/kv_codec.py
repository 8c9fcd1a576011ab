"""Encode and decode workers, memory layouts, announcements and prefix requests as messages of kv.proto.

`encode_*` takes values of `core`, `kv` and `engine`; `decode_*` takes a message from a peer. An incomplete or malformed
message raises TandemError(INVALID_REQUEST) and no other exception.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import SampledToken
from tandem.core.ids import BlockHash, BlockId, HandoffId, HandoffKey, Incarnation, WorkerId, WorkerRef
from tandem.engine.transfer_messages import TransportPeer, TransportRank
from tandem.kv.handoff import MAX_REMOTE_PREFIX_BLOCKS, Announcement, BlockDigest, RemotePrefixRequest
from tandem.kv.hashing import HASH_BYTES
from tandem.kv.layout import ITEM_BYTES, KVGroup, KVLayout, KVRegion
from tandem.wire.gen import kv_pb2 as pb


def malformed(message: str) -> TandemError:
    """Return the error that a decoder raises for a malformed message. `message`: text that describes what is wrong with
    it."""
    return TandemError(ErrorKind.INVALID_REQUEST, f"malformed message: {message}")


def require(ok: object, message: str) -> None:
    """Raise the error that `malformed` makes of the text `message`, unless `ok` is true."""
    if not ok:
        raise malformed(message)


def same_fields(source: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the attributes `names` of `source` as a dictionary, to build an object with the same field names.

    Used where fields have the same names in Python and protobuf. Slower than naming each field: do not use it for
    objects that are converted once per token.
    """
    return {name: getattr(source, name) for name in names}


# ---- identities


def encode_worker(ref: WorkerRef) -> pb.WorkerRef:
    return pb.WorkerRef(id=ref.id, incarnation=ref.incarnation, address=ref.address)


def decode_worker(message: pb.WorkerRef) -> WorkerRef:
    """Decode the identity of a worker. Raises TandemError(INVALID_REQUEST) where a part is missing."""
    require(message.id and message.incarnation and message.address, "a worker has an id, an incarnation and an address")
    return WorkerRef(WorkerId(message.id), Incarnation(message.incarnation), message.address)


def encode_handoff_key(key: HandoffKey) -> pb.HandoffKey:
    return pb.HandoffKey(handoff=key.handoff, attempt=key.attempt)


def decode_handoff_key(message: pb.HandoffKey) -> HandoffKey:
    require(message.handoff, "a hand-off key has no id")
    return HandoffKey(HandoffId(message.handoff), message.attempt)


def encode_pull_remainder(key: HandoffKey, num_output_tokens: int) -> pb.PullRemainder:
    """Encode the request by which a consumer asks the producer to stop the migrating sequence of the hand-off `key` and
    to hand over the rest of it.

    `num_output_tokens`: number of the sequence's output tokens that the consumer has already.
    """
    return pb.PullRemainder(key=encode_handoff_key(key), num_output_tokens=num_output_tokens)


def encode_prefix_request(key: HandoffKey, prefix_request: RemotePrefixRequest) -> pb.RemotePrefixRequest:
    """Encode a request to read the KV of a prompt's beginning from another worker's cache. `key`: key of the hand-off
    under which the blocks are read."""
    return pb.RemotePrefixRequest(
        key=encode_handoff_key(key), first_index=prefix_request.first_index, hashes=b"".join(prefix_request.hashes)
    )


def decode_prefix_request(message: pb.RemotePrefixRequest) -> tuple[HandoffKey, RemotePrefixRequest]:
    """Decode a request to read the KV of a prompt's beginning from this worker's cache. Returns the key of the hand-off
    under which the blocks are read, and the request. Raises TandemError(INVALID_REQUEST) where the message is
    malformed.
    """
    raw = message.hashes
    hashes = tuple(BlockHash(raw[i : i + HASH_BYTES]) for i in range(0, len(raw), HASH_BYTES))
    require(len(raw) % HASH_BYTES == 0, f"block hashes are {HASH_BYTES} bytes long")
    require(
        len(hashes) <= MAX_REMOTE_PREFIX_BLOCKS,
        f"{len(hashes)} blocks are requested, at most {MAX_REMOTE_PREFIX_BLOCKS} may be",
    )
    require(message.first_index < len(hashes), "no block is requested")
    return decode_handoff_key(message.key), RemotePrefixRequest(message.first_index, hashes)


# ---- memory


def encode_layout(layout: KVLayout) -> pb.KVLayout:
    groups = [pb.KVGroup(layers=g.layers, heads=g.heads, head_dim=g.head_dim, dtype=g.dtype) for g in layout.groups]
    return pb.KVLayout(block_size=layout.block_size, groups=groups)


def decode_layout(message: pb.KVLayout) -> KVLayout:
    require(message.block_size, "a layout has no block size")
    require(message.groups, "a layout has no group")
    return KVLayout(message.block_size, tuple(_decode_group(group) for group in message.groups))


def _decode_group(message: pb.KVGroup) -> KVGroup:
    require(message.layers and message.heads and message.head_dim, "a group has layers, heads and a head dimension")
    require(message.dtype in ITEM_BYTES, f"unknown dtype {message.dtype!r}")
    return KVGroup(message.layers, message.heads, message.head_dim, message.dtype)


_REGION = ("address", "num_blocks", "block_bytes", "head_start", "head_stop", "device")


def encode_region(region: KVRegion) -> pb.KVRegion:
    return pb.KVRegion(num_trial_blocks=region.num_probe_blocks, **same_fields(region, _REGION))


def decode_region(message: pb.KVRegion) -> KVRegion:
    require(message.num_blocks and message.block_bytes, "a region has blocks of some size")
    require(message.head_start < message.head_stop, "a region holds at least one head")
    require(message.device, "a region has no device")
    region = KVRegion(num_probe_blocks=message.num_trial_blocks, **same_fields(message, _REGION))
    end = region.address + region.num_all_blocks * region.block_bytes
    require(end <= 2**64, "a region ends in the address space")
    return region


def encode_peer(peer: TransportPeer) -> pb.TransportPeer:
    return pb.TransportPeer(
        worker=encode_worker(peer.worker),
        layout=encode_layout(peer.layout),
        ranks=[
            pb.TransportRank(
                agent=rank.agent, metadata=rank.metadata, region=encode_region(rank.region), host=rank.host
            )
            for rank in peer.ranks
        ],
    )


def decode_peer(message: pb.TransportPeer) -> TransportPeer:
    """Decode a worker's KV layout, and the transport agent and memory region of each of its ranks.

    Raises TandemError(INVALID_REQUEST) where the message is malformed or the size of a region's blocks does not match
    the layout. Does not check that the ranks together hold every KV head.
    """
    layout = decode_layout(message.layout)
    ranks = tuple(_decode_rank(rank, layout) for rank in message.ranks)
    require(ranks, "a transport peer has no rank")
    return TransportPeer(decode_worker(message.worker), layout, ranks)


def _decode_rank(message: pb.TransportRank, layout: KVLayout) -> TransportRank:
    require(message.agent, "a rank has no agent")
    region = decode_region(message.region)
    num_heads = region.head_stop - region.head_start
    require(region.head_stop <= max(g.heads for g in layout.groups), "a region holds heads that the model lacks")
    require(region.block_bytes == num_heads * layout.head_bytes, "a region's blocks are not as large as the layout's")
    return TransportRank(message.agent, message.metadata, region, message.host)


# ---- announcements of hand-offs


def encode_sampled(token: SampledToken, message: pb.SampledToken | None = None) -> pb.SampledToken:
    """Encode a sampled token with its log probabilities, and return the message.

    If `message` is given, it must be empty and is filled instead of a new message. This saves a copy where `message` is
    what `repeated_field.add()` has returned.
    """
    message = pb.SampledToken() if message is None else message
    message.id = token.id
    if token.logprob is not None:
        message.logprob = token.logprob
    for token_id, logprob in token.top:
        message.top_ids.append(token_id)
        message.top_logprobs.append(logprob)
    return message


def decode_sampled(message: pb.SampledToken) -> SampledToken:
    logprob = message.logprob if message.HasField("logprob") else None
    ids, logprobs = message.top_ids, message.top_logprobs
    require(len(ids) == len(logprobs), "alternatives and their log probabilities differ")
    return SampledToken(message.id, logprob, tuple(zip(ids, logprobs, strict=True)) if ids else ())


def encode_announcement(announcement: Announcement) -> pb.Announcement:
    """Encode an announcement of KV blocks that a consumer may read."""
    return pb.Announcement(
        key=encode_handoff_key(announcement.key),
        first_index=announcement.first_index,
        blocks=[pb.OfferedBlock(block=offered.block, digests=offered.heads) for offered in announcement.blocks],
        num_computed=announcement.num_computed,
        num_cached=announcement.num_cached,
        first_tokens=[encode_sampled(token) for token in announcement.first_tokens],
        moving=announcement.is_migrating,
        last=announcement.is_last,
    )


def decode_announcement(message: pb.Announcement) -> Announcement:
    """Decode an announcement of KV blocks. Raises TandemError(INVALID_REQUEST) where it is malformed."""
    blocks = tuple(BlockDigest(BlockId(offered.block), tuple(offered.digests)) for offered in message.blocks)
    digest_counts = {len(offered.heads) for offered in blocks}
    require(len(digest_counts) <= 1, "blocks of one announcement have different numbers of digests")
    first = tuple(decode_sampled(token) for token in message.first_tokens)
    key, rest = decode_handoff_key(message.key), (message.num_cached, message.moving, message.last)
    return Announcement(key, message.first_index, blocks, message.num_computed, first, *rest)
