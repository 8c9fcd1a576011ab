"""Keep evicted KV blocks in host memory: which host slot holds which block, and which copies the next step makes.

A hash has a slot in one of two states. *Sole*: no device block holds the content, and a prefix hit copies it back.
*Spare*: the content was copied back or computed again, and the host copy is kept as long as no other block needs the
slot, so that the hash can become sole again without a copy. Slots are reused from spare hashes first, then from the
hash that has been sole for longest.

If a block is cached in device or host memory, so are all blocks before it in its prefix (its parents). Device memory
evicts a child before its parent (`kv.block_pool`), so a hash becomes sole later than all its sole children, and the
hash that has been sole for longest has no sole children.

Files may hold blocks too (`engine.file_tier`): they are written from host slots and read into host slots, so a prefix
hit uses only blocks in device or host memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from tandem.core.events import BlockEvicted, BlockOffloaded, KVFact
from tandem.core.ids import BlockHash, BlockId, HostSlot

Offload = tuple[BlockId, HostSlot]
"""Copy the content of a device block to a host slot."""
Onload = tuple[HostSlot, BlockId]
"""Copy the content of a host slot to a device block."""
FileWrite = tuple[HostSlot, BlockHash]
"""Write the content of a host slot, which is that of a block with this hash, to a file."""


class OffloadDecision(NamedTuple):
    """Hold what the block pool must do after host memory has decided where blocks are kept.

    - `facts`: the KV events to report.
    - `is_copied`: a copy of the evicted device block to host memory was queued, so the block must be held until the
      copy is made.
    - `dropped`: device blocks that need not be held any more, because their queued copies to host memory were cancelled
      when their slots were needed for other blocks.
    """

    facts: list[KVFact]
    is_copied: bool = False
    dropped: tuple[BlockId, ...] = ()


class HostBlockPool:
    """Give evicted blocks a slot in host memory, and queue the copies between device and host. With `num_slots` 0
    nothing is kept.

    Copies collect until the plan of the next step takes them by `take_copies`. A step makes all its offloads (`spills`,
    device to host) before any onload (`fills`, host to device). If a step copies from or to a slot, no later step
    writes to this slot before `end_copies` was called for the copies of that step.

    `keeps_files`: collect the blocks that should be written to files, for `take_writes`. `in_files`: the hashes of the
    blocks that files hold as far as this worker knows; the owner of the files updates it.
    """

    def __init__(self, num_slots: int, *, keeps_files: bool = False) -> None:
        if num_slots < 0:
            raise ValueError(f"{num_slots} host slots")
        self.num_slots = num_slots
        self.in_files: set[BlockHash] = set()
        self.keeps_files = keeps_files
        self._num_used = 0
        self._free: list[HostSlot] = []
        self._slots: dict[BlockHash, HostSlot] = {}
        self._hash_of: dict[HostSlot, BlockHash] = {}
        # Sole hashes with their parents, and spare hashes, each in the order in which they became sole or spare.
        self._sole: OrderedDict[BlockHash, BlockHash | None] = OrderedDict()
        self._spare: OrderedDict[BlockHash, None] = OrderedDict()
        # Sole children by parent hash; a parent without sole children has no entry.
        self._children: dict[BlockHash, set[BlockHash]] = {}
        # Copies that the next plan is to make.
        self._spills: dict[HostSlot, BlockId] = {}
        self._fills: list[Onload] = []
        # Number of uses of a slot: all copies of open plans, the queued fills, and open reads and writes of files.
        # `_unnamed` holds pinned slots without a hash, which become free when their last use ends.
        self._pins: Counter[HostSlot] = Counter()
        self._unnamed: set[HostSlot] = set()
        # Filled slots whose content no file holds yet, oldest first.
        self._unwritten: OrderedDict[HostSlot, None] = OrderedDict()

    @property
    def num_held(self) -> int:
        """Count the slots with content that no device block holds; a prefix hit would copy it back to device memory."""
        return len(self._sole)

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Return whether a host slot holds the content of `block_hash` and no device block does."""
        return block_hash in self._sole

    def keep(self, block_hash: BlockHash, parent: BlockHash | None, block: BlockId) -> OffloadDecision:
        """Decide whether host memory keeps the content of `block`, which is about to be reused; return what the pool
        must do.

        `block_hash`: hash of the block; no other device block has it. `parent`: hash of the block before it in its
        prefix, None for a first block. If a slot still has the content, nothing is copied. Otherwise the hash gets a
        slot and a copy is queued. If no slot can be reused, because copies of uncommitted steps or reads and writes of
        files use all of them, the hash is lost. The hashes that follow it in their prefixes and are only in host memory
        are then lost too.
        """
        facts: list[KVFact] = []
        if block_hash in self._spare:
            del self._spare[block_hash]
            self._add_sole(block_hash, parent)
            return OffloadDecision([BlockOffloaded(block_hash)])
        slot, dropped = self._make_room(facts)
        if slot is None:
            return self._lose(block_hash)
        self._name(slot, block_hash)
        self._spills[slot] = block
        self._add_sole(block_hash, parent)
        facts.append(BlockOffloaded(block_hash))
        return OffloadDecision(facts, True, dropped)

    def needs_file(self, block_hash: BlockHash) -> bool:
        """Return whether neither a file nor a host slot has the content of `block_hash`."""
        return block_hash not in self.in_files and block_hash not in self._slots

    def copy_ahead(self, block_hash: BlockHash, block: BlockId) -> OffloadDecision | None:
        """Queue a copy of `block`, which stays in device memory, to a host slot, so that the content can be written to
        a file; return what the pool must do.

        `block_hash`: hash of the block, for which `needs_file` must be True. Returns None, with nothing changed, if all
        slots are in use, or if a block would have to be evicted that is only in host memory and in no file.
        """
        facts: list[KVFact] = []
        slot, dropped = self._make_room(facts, only_filed=True)
        if slot is None:
            return None
        self._name(slot, block_hash)
        self._spills[slot] = block
        self._spare[block_hash] = None
        return OffloadDecision(facts, True, dropped)

    def stored(self, block_hash: BlockHash) -> None:
        """Record that a device block holds the content of `block_hash` from now on. If the hash has a host slot, the
        slot keeps the content but may be reused for other blocks."""
        if block_hash in self._sole:
            self._remove_sole(block_hash)
            self._spare[block_hash] = None

    def claim(self, hashes: Iterable[BlockHash]) -> list[HostSlot]:
        """Return the host slots of `hashes`, whose content the caller is about to copy back to device memory, and
        protect these slots from reuse.

        The protection ends with `end_copies` for the step that makes the copies. Raises KeyError for a hash without a
        slot.
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
        if not self._spills and not self._fills:
            return (), ()
        spills = tuple((block, slot) for slot, block in self._spills.items())
        fills = tuple(self._fills)
        self._pins.update(self._spills.keys())
        self._spills.clear()
        self._fills.clear()
        return spills, fills

    def end_copies(self, spills: Iterable[Offload], fills: Iterable[Onload]) -> None:
        """Allow reuse of the host slots that the offloads (`spills`) and onloads (`fills`) of a step used, because the
        step has ended."""
        filled = [slot for _, slot in spills]
        if self.keeps_files:
            self._unwritten.update(dict.fromkeys(slot for slot in filled if slot in self._hash_of))
        self.unpin([*filled, *(slot for slot, _ in fills)])

    def unpin(self, slots: Iterable[HostSlot]) -> None:
        """End one use of each of `slots`. A slot is protected from reuse as long as it has a use: a copy of an
        uncommitted step, or an open read or write of a file."""
        for slot in slots:
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                if slot in self._unnamed:
                    self._unnamed.remove(slot)
                    self._free.append(slot)

    def take_writes(self, most: int) -> tuple[FileWrite, ...]:
        """Return up to `most` blocks that should be written to files, as pairs (host slot, block hash), and protect
        their slots from reuse until `unpin`. Blocks that came to host memory first are returned first."""
        if not self._unwritten:
            return ()
        writes: list[FileWrite] = []
        while self._unwritten and len(writes) < most:
            slot, _ = self._unwritten.popitem(last=False)
            if self._hash_of[slot] not in self.in_files:
                writes.append((slot, self._hash_of[slot]))
        self._pins.update(slot for slot, _ in writes)
        return tuple(writes)

    def reserve(self, number: int, prefix: Sequence[BlockHash]) -> tuple[list[HostSlot], OffloadDecision]:
        """Reserve up to `number` slots for blocks that will be read from files; return the slots, and what the pool
        must do for the blocks that were evicted to make room.

        `prefix`: the hashes of the blocks before those to be read, which are not evicted. The result has fewer slots
        where host memory has no room for more. The slots are protected from reuse until `admit` or `unpin`.
        """
        for block_hash in reversed(prefix):
            if block_hash in self._sole:
                self._sole.move_to_end(block_hash)
        facts: list[KVFact] = []
        dropped: list[BlockId] = []
        slots: list[HostSlot] = []
        kept = frozenset(prefix)
        while len(slots) < number:
            slot, lost = self._make_room(facts, kept)
            if slot is None:
                break
            dropped += lost
            slots.append(slot)
            self._unnamed.add(slot)
            self._pins[slot] += 1
        return slots, OffloadDecision(facts, dropped=tuple(dropped))

    def write_later(self, slot: HostSlot, block_hash: BlockHash) -> None:
        """Queue a block to be written to a file again, because the last attempt failed. Does nothing where `slot` does
        not hold the block any more."""
        if self._hash_of.get(slot) == block_hash:
            self._unwritten[slot] = None

    def admit(self, slots: Mapping[BlockHash, HostSlot], chain: Sequence[BlockHash]) -> None:
        """Record that slots, which were reserved by `reserve`, now hold blocks that were read from files.

        `slots`: the slot of each of these blocks, by block hash; no device block and no other slot holds them. `chain`:
        the hashes of the whole prefix, from its first block to the last of these blocks. From now on the blocks of this
        prefix are evicted from host memory after all others.
        """
        for i in range(len(chain) - 1, -1, -1):
            block_hash = chain[i]
            slot = slots.get(block_hash)
            if slot is not None:
                self._unnamed.remove(slot)
                self._name(slot, block_hash)
                self._add_sole(block_hash, chain[i - 1] if i else None)
                self.unpin([slot])
            elif block_hash in self._sole:
                self._sole.move_to_end(block_hash)

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
        that is not committed yet, and for each open read or write of a file.
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
        assert self._hash_of == {slot: name for name, slot in self._slots.items()}, "slots and hashes differ"
        assert self._unwritten.keys() <= self._hash_of.keys(), "a slot without a hash is to be written to a file"
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

    def _make_room(
        self, facts: list[KVFact], kept: Collection[BlockHash] = (), *, only_filed: bool = False
    ) -> tuple[HostSlot | None, tuple[BlockId, ...]]:
        """Return an empty slot, and the block whose queued offload to this slot was cancelled, if any.

        The slot is None if all slots are in use, or if the slot to be reused next has a hash of `kept` that is only in
        host memory. With `only_filed` it is also None if that slot has a block that neither device memory nor a file
        has. Evictions that make room are appended to `facts`.
        """
        if self._free:
            return self._free.pop(), ()
        if self._num_used < self.num_slots:
            self._num_used += 1
            return HostSlot(self._num_used - 1), ()
        block_hash = self._oldest()
        if block_hash is None or (block_hash in kept and block_hash in self._sole):
            return None, ()
        if only_filed and block_hash in self._sole and block_hash not in self.in_files:
            return None, ()
        if block_hash in self._spare:
            del self._spare[block_hash]
        else:
            self._remove_sole(block_hash)
            facts.append(BlockEvicted(block_hash))
        dropped = self._vacate(block_hash)
        return self._free.pop(), dropped

    def _oldest(self) -> BlockHash | None:
        """Return the hash whose slot is reused next, even if the offload to this slot is still queued; None if no slot
        can be reused.

        Spare hashes come first, except those whose slots are in use or get a block by `copy_ahead`. Then come sole
        hashes without sole children, whose slots are not in use.
        """
        for block_hash in self._spare:
            slot = self._slots[block_hash]
            if slot not in self._pins and slot not in self._spills:
                return block_hash
        for block_hash in self._sole:
            if block_hash not in self._children and self._slots[block_hash] not in self._pins:
                return block_hash
        return None

    def _name(self, slot: HostSlot, block_hash: BlockHash) -> None:
        self._slots[block_hash] = slot
        self._hash_of[slot] = block_hash

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
        del self._hash_of[slot]
        self._unwritten.pop(slot, None)
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
