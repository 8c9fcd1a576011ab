"""Describe one rank's KV memory to transports: address, layout and range of heads. The owner allocates and frees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.ids import Incarnation, WorkerId
from tandem.kv.layout import KVLayout, KVRegion


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """Hold address and shape of one rank's KV memory in this process.

    `region`: address, number of blocks, and range of KV heads that the rank holds. `layout`: layout of a block of the
    whole model, with all heads. `keepalive`: the object that keeps the memory mapped, for instance a tensor. Raises
    ValueError when the heads or the block size of the region do not fit `layout`.
    """

    region: KVRegion
    layout: KVLayout
    keepalive: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        region = self.region
        if not 0 <= region.head_start < region.head_stop <= self.layout.group.heads:
            raise ValueError(f"a pool of KV heads [{region.head_start}, {region.head_stop}) of {self.layout}")
        if region.block_bytes != len(self.heads) * self.layout.head_bytes:
            raise ValueError(f"blocks of {region.block_bytes} bytes are no share of {self.layout}: {region}")

    @property
    def heads(self) -> range:
        """Return the range of the model's KV heads that the pool holds."""
        return range(self.region.head_start, self.region.head_stop)

    @property
    def num_bytes(self) -> int:
        """Return the size of all blocks in bytes, including the blocks for bandwidth probes."""
        return self.region.num_all_blocks * self.region.block_bytes


def agent_name(worker: WorkerId, incarnation: Incarnation, rank: int = 0) -> str:
    """Return the name of the transport agent of rank `rank`. It contains the incarnation, so that the agent of a
    restarted worker has another name."""
    return f"{worker}.{incarnation}.{rank}"


def cuda_number(device: str) -> int | None:
    """Return N for the device `cuda:N`, 0 for `cuda` and None for `cpu`. Raises ValueError for other devices."""
    kind, _, number = device.partition(":")
    if kind == "cpu" and not number:
        return None
    if kind == "cuda":
        return int(number or 0)
    raise ValueError(f"no transport knows memory of {device!r}")
