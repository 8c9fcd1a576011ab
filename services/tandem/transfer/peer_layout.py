"""Check a peer's memory description before a read, and compute which byte ranges of its blocks hold the local KV heads.

With different tensor-parallel degrees on the two sides, a local block is filled from several ranks of the peer, or
from a part of one rank's block. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tandem.engine.transfer_messages import TransportPeer, TransportRank
from tandem.transfer.interface import BlockCopy, PeerError
from tandem.transfer.memory_pool import MemoryPool

_T = TypeVar("_T")


class CopyRefused(PeerError):
    """Raised when a read names no block, or a block that does not exist in one of the two pools.

    Nothing was read, and the peer's other reads go on.
    """


@dataclass(frozen=True, slots=True)
class RankShare:
    """Describe the part of each block that one rank of a peer (`rank`) supplies: `num_bytes` bytes, which are copied
    from `remote_offset` in the rank's block to `local_offset` in the local block."""

    rank: TransportRank
    remote_offset: int
    local_offset: int
    num_bytes: int
    is_whole: bool
    """Whether both sides' blocks hold the same heads, so that adjacent blocks are contiguous memory on both sides."""


def check_peer(pool: MemoryPool, peer: TransportPeer) -> None:
    """Raise PeerError unless the ranks of `peer` together hold each KV head of the model exactly once, in blocks of the
    same layout as the blocks of the local `pool`.

    The two workers may have different numbers of ranks.
    """
    if peer.layout != pool.layout:
        raise PeerError(f"{peer.worker} holds KV blocks of {peer.layout}, this worker of {pool.layout}")
    if len({rank.agent for rank in peer.ranks}) != len(peer.ranks):
        raise PeerError(f"{peer.worker} names one agent for several ranks")
    regions = sorted((rank.region for rank in peer.ranks), key=lambda region: region.head_start)
    starts = [region.head_start for region in regions]
    stops = [region.head_stop for region in regions]
    num_heads = pool.layout.group.heads
    if [0, *stops] != [*starts, num_heads] or any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        ranges = ", ".join(f"[{start}, {stop})" for start, stop in zip(starts, stops, strict=True)) or "none"
        raise PeerError(f"{peer.worker} must hold {num_heads} KV heads, each once, and has {ranges}")
    for region in regions:
        if region.block_bytes != (region.head_stop - region.head_start) * pool.layout.head_bytes or region.address < 1:
            raise PeerError(f"{peer.worker} describes a region that does not fit its layout: {region}")
        if region.num_blocks != regions[0].num_blocks or region.num_blocks < 1:
            raise PeerError(f"the ranks of {peer.worker} have {[r.num_blocks for r in regions]} blocks")
        if region.num_probe_blocks != regions[0].num_probe_blocks:
            raise PeerError(f"the ranks of {peer.worker} have {[r.num_probe_blocks for r in regions]} trial blocks")


def shares_of(pool: MemoryPool, peer: TransportPeer) -> tuple[RankShare, ...]:
    """Return, for each rank of `peer` that holds some of the KV heads in `pool`, the part of each block that the rank
    supplies. Ranks that hold none of these heads are left out. The caller must have checked the peer by
    `check_peer`."""
    return tuple(
        _share(pool, rank)
        for rank in peer.ranks
        if rank.region.head_start < pool.heads.stop and pool.region.head_start < rank.region.head_stop
    )


def _share(pool: MemoryPool, rank: TransportRank) -> RankShare:
    head_bytes = pool.layout.head_bytes
    region = rank.region
    start = max(region.head_start, pool.region.head_start)
    stop = min(region.head_stop, pool.heads.stop)
    return RankShare(
        rank=rank,
        remote_offset=(start - region.head_start) * head_bytes,
        local_offset=(start - pool.region.head_start) * head_bytes,
        num_bytes=(stop - start) * head_bytes,
        is_whole=(region.head_start, region.head_stop) == (pool.region.head_start, pool.heads.stop),
    )


def decode_metadata(peer: TransportPeer, rank: TransportRank, kind: type[_T], transport: str) -> _T:
    """Decode the metadata of a rank of `peer`, which the transport named `transport` writes as the JSON of a `kind`.
    Raises PeerError where the metadata is not that of such a transport."""
    try:
        return msgspec.json.decode(rank.metadata, type=kind)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"{peer.worker} is no {transport} transport: {error}") from None


def check_copies(pool: MemoryPool, peer: TransportPeer, copies: Sequence[BlockCopy]) -> None:
    """Raise CopyRefused if `copies` is empty, or names a block that is not in `pool` or not in the pool of `peer`."""
    if not copies:
        raise CopyRefused("a read of no blocks")
    theirs = peer.ranks[0].region
    ours = pool.region
    for copy in copies:
        if not 0 <= copy.remote < theirs.num_all_blocks:
            raise CopyRefused(f"{peer.worker} has no block {copy.remote}, it has {theirs.num_all_blocks}")
        if not 0 <= copy.local < ours.num_all_blocks:
            raise CopyRefused(f"this worker has no block {copy.local}, it has {ours.num_all_blocks}")


def join_ranks(parts: Sequence[TransportPeer]) -> TransportPeer:
    """Merge the descriptions of a worker's ranks into one description of the worker. `parts`: for each rank, a
    description with this rank alone, in rank order.

    Raises ValueError when the parts differ in worker or layout.
    """
    first, *others = parts
    if any((part.worker, part.layout) != (first.worker, first.layout) for part in others):
        raise ValueError(f"{len(parts)} ranks describe different workers or layouts: {parts}")
    return TransportPeer(first.worker, first.layout, tuple(rank for part in parts for rank in part.ranks))
