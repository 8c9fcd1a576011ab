"""One worker's KV memory as transports see it: an address and a layout; never allocates or frees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.ids import BlockId, Incarnation, WorkerId
from tandem.kv.layout import KVLayout, KVRegion


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """`num_blocks` blocks of `layout`, back to back from `address` of this process, on `device` (`cpu`, `cuda:N`).

    `keepalive` is whatever must live for the memory to stay mapped, a tensor for instance.
    """

    address: int
    num_blocks: int
    layout: KVLayout
    device: str = "cpu"
    keepalive: object = field(default=None, repr=False, compare=False)

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def region(self) -> KVRegion:
        """The pool as peers are told of it; one tensor-parallel rank that holds every head."""
        return KVRegion(
            address=self.address,
            num_blocks=self.num_blocks,
            block_bytes=self.block_bytes,
            head_start=0,
            head_stop=self.layout.group.heads,
            device=self.device,
        )

    def block_address(self, block: BlockId) -> int:
        return self.address + block * self.block_bytes


def agent_name(worker: WorkerId, incarnation: Incarnation) -> str:
    """A transport agent's name; contains the incarnation, so that a later life is another agent."""
    return f"{worker}.{incarnation}"
