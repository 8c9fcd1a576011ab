"""Describe one rank's KV memory to transports: address, layout and range of heads. The owner allocates and frees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.ids import BlockId, Incarnation, WorkerId
from tandem.kv.layout import KVLayout, KVRegion


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """`num_blocks` contiguous KV blocks from `address` of this process, on `device` (`cpu`, `cuda:N`).

    `layout` is that of the whole model; the pool holds its KV heads `[head_start, head_stop)`, where None means up to
    the last head. `keepalive` is the object that keeps the memory mapped, for instance a tensor. The blocks are
    followed by 2 * `num_probe_blocks` blocks for bandwidth probes, see `KVRegion`.
    """

    address: int
    num_blocks: int
    layout: KVLayout
    device: str = "cpu"
    head_start: int = 0
    head_stop: int | None = None
    keepalive: object = field(default=None, repr=False, compare=False)
    num_probe_blocks: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.head_start < self.heads.stop <= self.layout.group.heads:
            raise ValueError(f"a pool of KV heads [{self.head_start}, {self.heads.stop}) of {self.layout}")

    @classmethod
    def of(cls, region: KVRegion, layout: KVLayout, keepalive: object) -> MemoryPool:
        """Return the pool of a region of this process.

        Raises ValueError when the block size does not match the region's heads in `layout`.
        """
        pool = cls(
            region.address,
            region.num_blocks,
            layout,
            region.device,
            region.head_start,
            region.head_stop,
            keepalive,
            region.num_probe_blocks,
        )
        if pool.block_bytes != region.block_bytes:
            raise ValueError(f"blocks of {region.block_bytes} bytes are no share of {layout}: {region}")
        return pool

    @property
    def heads(self) -> range:
        """Return which KV heads of the model the pool holds."""
        return range(self.head_start, self.layout.group.heads if self.head_stop is None else self.head_stop)

    @property
    def block_bytes(self) -> int:
        return len(self.heads) * self.layout.head_bytes

    @property
    def num_bytes(self) -> int:
        """Count the bytes of all blocks, those for bandwidth probes included."""
        return self.region().num_all_blocks * self.block_bytes

    def region(self) -> KVRegion:
        """Return the description of the pool that peers receive."""
        return KVRegion(
            address=self.address,
            num_blocks=self.num_blocks,
            block_bytes=self.block_bytes,
            head_start=self.head_start,
            head_stop=self.heads.stop,
            device=self.device,
            num_probe_blocks=self.num_probe_blocks,
        )

    def block_address(self, block: BlockId) -> int:
        return self.address + block * self.block_bytes


def agent_name(worker: WorkerId, incarnation: Incarnation, rank: int = 0) -> str:
    """Return the name of a rank's transport agent; with the incarnation in it, a restarted worker is another agent."""
    return f"{worker}.{incarnation}.{rank}"
