"""Build pools of KV memory for transports, as a rank would."""

from __future__ import annotations

from tandem.kv.layout import KVLayout, KVRegion
from tandem.transfer.memory_pool import MemoryPool


def memory_pool(
    address: int,
    num_blocks: int,
    layout: KVLayout,
    device: str = "cpu",
    *,
    heads: range | None = None,
    keepalive: object = None,
    num_probe_blocks: int = 0,
) -> MemoryPool:
    """Return a pool of `num_blocks` contiguous blocks from `address` on, with some or all KV heads of `layout`."""
    held = range(layout.group.heads) if heads is None else heads
    block_bytes = len(held) * layout.head_bytes
    region = KVRegion(address, num_blocks, block_bytes, held.start, held.stop, device, num_probe_blocks)
    return MemoryPool(region, layout, keepalive)
