"""What a transport checks before it touches a peer's memory; pure, never talks to the peer."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.ports import BlockCopy, PeerError, TransportPeer
from tandem.transfer.pool import MemoryPool


class CopyRefused(PeerError):
    """A read named a block that does not exist. Nothing was read; the peer and its other reads are unharmed."""


def check_peer(pool: MemoryPool, peer: TransportPeer) -> None:
    """Raise PeerError unless every block of the peer can be copied whole into a block of ours.

    Layouts must be equal and there is one region: other tensor-parallel degrees are not convertible yet.
    """
    if peer.layout != pool.layout:
        raise PeerError(f"{peer.worker} holds KV blocks of {peer.layout}, this worker of {pool.layout}")
    if len(peer.regions) != 1:
        raise PeerError(f"{peer.worker} spreads its KV over {len(peer.regions)} ranks, this worker reads from one")
    (region,) = peer.regions
    if (region.head_start, region.head_stop) != (0, pool.layout.group.heads):
        raise PeerError(
            f"{peer.worker} holds KV heads [{region.head_start}, {region.head_stop}), "
            f"this worker needs [0, {pool.layout.group.heads})"
        )
    if region.block_bytes != pool.block_bytes or region.num_blocks < 1 or region.address < 1:
        raise PeerError(f"{peer.worker} describes a region that does not fit its layout: {region}")


def check_copies(pool: MemoryPool, peer: TransportPeer, copies: Sequence[BlockCopy]) -> None:
    """Raise CopyRefused unless `copies` is not empty and names blocks inside both pools."""
    if not copies:
        raise CopyRefused("a read of no blocks")
    (region,) = peer.regions
    for copy in copies:
        if not 0 <= copy.remote < region.num_blocks:
            raise CopyRefused(f"{peer.worker} has no block {copy.remote}, it has {region.num_blocks}")
        if not 0 <= copy.local < pool.num_blocks:
            raise CopyRefused(f"this worker has no block {copy.local}, it has {pool.num_blocks}")
