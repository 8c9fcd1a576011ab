"""Keep evicted KV blocks in host memory: which host slot holds which block, and which copies the next step makes.

A hash has a slot in one of two states. *Sole*: no device block holds the content, and a prefix hit copies it back.
*Spare*: the content was copied back or computed again, and the host copy is kept as long as no other block needs the
slot, so that the hash can become sole again without a copy. Slots are reused from spare hashes first, then from the
hash that has been sole for longest.

A cached block implies its parents over both memories. Device memory evicts a child before its parent (`kv.block_pool`),
so a hash becomes sole later than all its sole children, and the hash that has been sole for longest has no sole
children.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from tandem.core.events import BlockEvicted, BlockOffloaded, KVFact
from tandem.core.ids import BlockHash, BlockId, HostSlot

Offload = tuple[BlockId, HostSlot]
"""Copy the content of a device block to a host slot."""
Onload = tuple[HostSlot, BlockId]
"""Copy the content of a host slot to a device block."""


class OffloadDecision(NamedTuple):
    """What happens to a cached block that device memory evicts.

    `facts`: the KV events to report. `is_copied`: the next step copies the block to host memory. `dropped`: blocks
    whose earlier queued offload was cancelled to free its slot.
    """

    facts: list[KVFact]
    is_copied: bool = False
    dropped: tuple[BlockId, ...] = ()


class HostBlockPool:
    """Give evicted blocks a slot in host memory, and queue the copies between device and host. With `num_slots` 0
    nothing is kept.

    Copies collect until the plan of the next step takes them by `take_copies`. A step makes all its offloads (`spills`,
    device to host) before any onload (`fills`, host to device). A slot that a step copies from or to is not written by
    a later step until `end_copies` for the first.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"{num_slots} host slots")
        self.num_slots = num_slots
        self._num_used = 0
        self._free: list[HostSlot] = []
        self._slots: dict[BlockHash, HostSlot] = {}
        # Sole hashes with their parents, and spare hashes, each in the order in which they became sole or spare.
        self._sole: OrderedDict[BlockHash, BlockHash | None] = OrderedDict()
        self._spare: OrderedDict[BlockHash, None] = OrderedDict()
        # Sole children by parent hash; a parent without sole children has no entry.
        self._children: dict[BlockHash, set[BlockHash]] = {}
        # Copies that the next plan is to make.
        self._spills: dict[HostSlot, BlockId] = {}
        self._fills: list[Onload] = []
        # Number of copies that use a slot: all copies of open plans, and the queued fills. `_unnamed` holds pinned
        # slots without a hash, which become free when their last copy ends.
        self._pins: Counter[HostSlot] = Counter()
        self._unnamed: set[HostSlot] = set()

    @property
    def num_held(self) -> int:
        """Count the slots with content that no device block holds; a prefix hit would copy it back to device memory."""
        return len(self._sole)

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Return whether a host slot holds the content of `block_hash` and no device block does."""
        return block_hash in self._sole

    def keep(self, block_hash: BlockHash, parent: BlockHash | None, block: BlockId) -> OffloadDecision:
        """Decide whether the content of `block` goes to host memory, when this last device block with its hash is to be
        reused.

        The hash gets a slot in host memory and a copy is queued, unless a slot still has the content. When copies of
        uncommitted steps use all slots, the hash is lost, together with the hashes that follow it in their prefixes and
        are only in host memory. `parent` is the hash of the block before it, None for a first block.
        """
        facts: list[KVFact] = []
        if block_hash in self._spare:
            del self._spare[block_hash]
            self._add_sole(block_hash, parent)
            return OffloadDecision([BlockOffloaded(block_hash)])
        slot, dropped = self._make_room(facts)
        if slot is None:
            return self._lose(block_hash)
        self._slots[block_hash] = slot
        self._spills[slot] = block
        self._add_sole(block_hash, parent)
        facts.append(BlockOffloaded(block_hash))
        return OffloadDecision(facts, True, dropped)

    def stored(self, block_hash: BlockHash) -> None:
        """Note that a device block holds the content of `block_hash` from now on: its host slot, if any, stays filled
        but may be reused."""
        if block_hash in self._sole:
            self._remove_sole(block_hash)
            self._spare[block_hash] = None

    def claim(self, hashes: Iterable[BlockHash]) -> list[HostSlot]:
        """Return the host slots of `hashes`, and protect the slots from reuse.

        The caller is about to copy their content back to device memory; the protection ends with `end_copies` for the
        step that makes the copies. Raises KeyError for a hash without a slot.
        """
        slots = []
        for block_hash in hashes:
            slots.append(self._slots[block_hash])
            self.stored(block_hash)
        self._pins.update(slots)
        return slots

    def fill(self, slots: Sequence[HostSlot], blocks: Sequence[BlockId]) -> None:
        """Queue a copy from each of `slots`, which `claim` returned, to the device block at the same index of
        `blocks`."""
        self._fills += zip(slots, blocks, strict=True)

    def take_copies(self) -> tuple[tuple[Offload, ...], tuple[Onload, ...]]:
        """Return the queued offloads and onloads, which the caller's next step must make, and clear both queues."""
        spills = tuple((block, slot) for slot, block in self._spills.items())
        fills = tuple(self._fills)
        self._pins.update(self._spills.keys())
        self._spills.clear()
        self._fills.clear()
        return spills, fills

    def end_copies(self, spills: Iterable[Offload], fills: Iterable[Onload]) -> None:
        """Allow reuse of the host slots that the offloads (`spills`) and onloads (`fills`) of a step used, because the
        step has ended."""
        for slot in [*(slot for _, slot in spills), *(slot for slot, _ in fills)]:
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                if slot in self._unnamed:
                    self._unnamed.remove(slot)
                    self._free.append(slot)

    @property
    def has_copies(self) -> bool:
        """Return whether copies between device and host memory are queued, which the plan of the next step must take by
        `take_copies`."""
        return bool(self._spills or self._fills)

    def blocks_to_spill(self) -> Collection[BlockId]:
        """Return the device blocks whose copies to host memory are queued for the next step."""
        return self._spills.values()

    def blocks_to_fill(self) -> Iterable[BlockId]:
        """Return the device blocks into which copies from host memory are queued for the next step."""
        return (block for _, block in self._fills)

    def check(self, device: Collection[BlockHash], pinned: Iterable[HostSlot]) -> None:
        """Recount slots, their copies and the parents of hashes, and raise AssertionError naming the first difference.

        `device`: all hashes that device memory holds. `pinned`: each slot once for each copy that uses it in a step
        that is not committed yet.
        """
        slots, free = list(self._slots.values()), set(self._free)
        assert self._slots.keys() == self._sole.keys() | self._spare.keys(), (
            "a slot belongs to a hash that is neither sole nor spare"
        )
        assert self._sole.keys().isdisjoint(device) and self._spare.keys() <= set(device), (
            "sole is spare, or spare sole"
        )
        all_slots = [*slots, *free, *self._unnamed]
        assert sorted(all_slots) == list(range(self._num_used)) and len(free) == len(self._free), (
            "a slot is lost or used twice"
        )
        assert self._pins == Counter([*pinned, *(slot for slot, _ in self._fills)]), f"pins are {self._pins}"
        assert self._unnamed <= self._pins.keys() and free.isdisjoint(self._pins), "a slot is free and copied"
        assert set(self._spills) <= set(slots), "an offload goes to a slot without a hash"
        children: dict[BlockHash, set[BlockHash]] = {}
        later = set(device)
        for block_hash, parent in reversed(self._sole.items()):
            assert parent is None or parent in later, f"{block_hash.hex()} is present without its parent"
            later.add(block_hash)
            if parent is not None:
                children.setdefault(parent, set()).add(block_hash)
        assert children == self._children, "children and parents differ"

    def __repr__(self) -> str:
        return f"<host pool {self.num_slots} slots: {len(self._sole)} sole, {len(self._spare)} spare>"

    def _make_room(self, facts: list[KVFact]) -> tuple[HostSlot | None, tuple[BlockId, ...]]:
        """Return an empty slot, and the block whose queued offload to that slot was cancelled, if any.

        The slot is None while open plans use every slot. Evictions that make room are appended to `facts`.
        """
        if self._free:
            return self._free.pop(), ()
        if self._num_used < self.num_slots:
            self._num_used += 1
            return HostSlot(self._num_used - 1), ()
        block_hash = self._oldest()
        if block_hash is None:
            return None, ()
        if block_hash in self._spare:
            del self._spare[block_hash]
        else:
            self._remove_sole(block_hash)
            facts.append(BlockEvicted(block_hash))
        dropped = self._vacate(block_hash)
        return self._free.pop(), dropped

    def _oldest(self) -> BlockHash | None:
        """Return the hash whose slot is reused next, or None while open plans use the slots; its own offload may still
        be queued."""
        for hashes in (self._spare, self._sole):
            block_hash = next(iter(hashes), None)
            if block_hash is not None and self._slots[block_hash] not in self._pins:
                return block_hash
        return None

    def _lose(self, block_hash: BlockHash) -> OffloadDecision:
        """Evict a hash and the sole hashes that follow it in their chains, each before its parent."""
        lost = [block_hash]
        for descendant in lost:
            lost += self._children.get(descendant, ())
        dropped: list[BlockId] = []
        for descendant in reversed(lost[1:]):
            self._remove_sole(descendant)
            dropped += self._vacate(descendant)
        return OffloadDecision([BlockEvicted(lost_hash) for lost_hash in reversed(lost)], False, tuple(dropped))

    def _vacate(self, block_hash: BlockHash) -> tuple[BlockId, ...]:
        """Remove a hash from its slot; return the block whose queued offload to that slot was cancelled, if any."""
        slot = self._slots.pop(block_hash)
        (self._unnamed.add if slot in self._pins else self._free.append)(slot)
        block = self._spills.pop(slot, None)
        return () if block is None else (block,)

    def _add_sole(self, block_hash: BlockHash, parent: BlockHash | None) -> None:
        self._sole[block_hash] = parent
        if parent is not None:
            self._children.setdefault(parent, set()).add(block_hash)

    def _remove_sole(self, block_hash: BlockHash) -> None:
        parent = self._sole.pop(block_hash)
        if parent is not None:
            siblings = self._children[parent]
            siblings.remove(block_hash)
            if not siblings:
                del self._children[parent]
