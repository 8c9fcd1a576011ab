"""One rank's KV memory as transports see it: an address, a layout, a range of heads; never allocates or frees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.ids import BlockId, Incarnation, WorkerId
from tandem.kv.layout import KVLayout, KVRegion


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """`num_blocks` blocks, back to back from `address` of this process, on `device` (`cpu`, `cuda:N`).

    `layout` is the whole model's; here are its KV heads `[head_start, head_stop)`, None: up to the last. `keepalive` is
    whatever must live for the memory to stay mapped, a tensor for instance. Behind its blocks lie twice
    `num_probe_blocks`, see `KVRegion`.
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
        """The pool of a region of this process. Raises ValueError when its blocks are not its share of the layout's."""
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
        """Which of the model's KV heads are here."""
        return range(self.head_start, self.layout.group.heads if self.head_stop is None else self.head_stop)

    @property
    def block_bytes(self) -> int:
        return len(self.heads) * self.layout.head_bytes

    @property
    def num_bytes(self) -> int:
        """With the blocks of trials."""
        return self.region().num_all_blocks * self.block_bytes

    def region(self) -> KVRegion:
        """The pool as peers are told of it."""
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
    """A transport agent's name; contains the incarnation, so that a later life is another agent."""
    return f"{worker}.{incarnation}.{rank}"
