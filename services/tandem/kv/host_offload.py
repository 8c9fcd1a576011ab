"""Owns which host slot holds the copy of which block, and which copies between the two memories a plan is to make;
never touches KV bytes and never knows who holds a device block.

A name is here in one of two ways. *Sole*: no device block holds it, and a prefix hit brings it back. *Spare*: it came
back or was computed again, and its copy is kept for as long as nobody else needs the slot, so that it can be sole again
without being copied. A slot is taken from spares first, then from the name that has been sole for longest.

Presence implies parents over both memories. Device memory loses a child before its parent (`kv.pool`), so a name is
sole later than all its sole children, and the one that has been sole for longest has none.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from tandem.core.events import BlockEvicted, BlockOffloaded, KVFact
from tandem.core.ids import BlockHash, BlockId, HostSlot

Offload = tuple[BlockId, HostSlot]
"""Copy a block's content out."""
Onload = tuple[HostSlot, BlockId]
"""Copy it in."""


class OffloadDecision(NamedTuple):
    """What became of a name that device memory is losing. `is_copied`: the next plan copies its block out. `dropped`
    are blocks that the next plan was to copy out and does not any more."""

    facts: list[KVFact]
    is_copied: bool = False
    dropped: tuple[BlockId, ...] = ()


class HostBlockPool:
    """A fixed number of slots, of one block each; with none of them it holds nothing and loses all it is given.

    Copies collect until a plan takes them (`take_copies`). It makes all spills before any fill. No slot of a plan that
    is open is written by a later one, until `end_copies`.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"{num_slots} host slots")
        self.num_slots = num_slots
        self._num_used = 0
        self._free: list[HostSlot] = []
        self._slots: dict[BlockHash, HostSlot] = {}
        # Sole names with their parents and spare ones, in the order in which they became so.
        self._sole: OrderedDict[BlockHash, BlockHash | None] = OrderedDict()
        self._spare: OrderedDict[BlockHash, None] = OrderedDict()
        # Of each name that has any, its sole children.
        self._children: dict[BlockHash, set[BlockHash]] = {}
        # What the plan that is being made is to copy.
        self._spills: dict[HostSlot, BlockId] = {}
        self._fills: list[Onload] = []
        # How many copies of open plans, and fills of the one that is being made, name a slot; those without a name,
        # which are free as soon as none does.
        self._pins: Counter[HostSlot] = Counter()
        self._unnamed: set[HostSlot] = set()

    @property
    def num_held(self) -> int:
        """Slots that a prefix hit would bring back."""
        return len(self._sole)

    def __contains__(self, name: BlockHash) -> bool:
        """Whether it is sole."""
        return name in self._sole

    def names(self) -> Collection[BlockHash]:
        """The sole ones."""
        return self._sole.keys()

    def slot(self, name: BlockHash) -> HostSlot:
        """Where the copy of a name is, or will be once the next plan has made it."""
        return self._slots[name]

    def keep(self, name: BlockHash, parent: BlockHash | None, block: BlockId) -> OffloadDecision:
        """Device memory is about to reuse `block`, its last of this name. Where there is no slot the name is lost, and
        what comes after it."""
        facts: list[KVFact] = []
        if name in self._spare:
            del self._spare[name]
            self._add_sole(name, parent)
            return OffloadDecision([BlockOffloaded(name)])
        slot, dropped = self._make_room(facts)
        if slot is None:
            return self._lose(name)
        self._slots[name] = slot
        self._spills[slot] = block
        self._add_sole(name, parent)
        facts.append(BlockOffloaded(name))
        return OffloadDecision(facts, True, dropped)

    def stored(self, name: BlockHash) -> None:
        """A device block holds it from now on."""
        if name in self._sole:
            self._remove_sole(name)
            self._spare[name] = None

    def claim(self, names: Iterable[BlockHash]) -> list[HostSlot]:
        """Sole names are about to come back: their slots are not reused until the plan that copies them is over."""
        slots = []
        for name in names:
            slots.append(self._slots[name])
            self.stored(name)
        self._pins.update(slots)
        return slots

    def fill(self, slots: Sequence[HostSlot], blocks: Sequence[BlockId]) -> None:
        """Claimed slots come into these blocks."""
        self._fills += zip(slots, blocks, strict=True)

    def take_copies(self) -> tuple[tuple[Offload, ...], tuple[Onload, ...]]:
        """What the next plan copies out and in."""
        spills = tuple((block, slot) for slot, block in self._spills.items())
        fills = tuple(self._fills)
        self._pins.update(self._spills.keys())
        self._spills.clear()
        self._fills.clear()
        return spills, fills

    def end_copies(self, spills: Iterable[Offload], fills: Iterable[Onload]) -> None:
        """The plan that took them is over."""
        for slot in [*(slot for _, slot in spills), *(slot for slot, _ in fills)]:
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                if slot in self._unnamed:
                    self._unnamed.remove(slot)
                    self._free.append(slot)

    @property
    def has_copies(self) -> bool:
        """The next plan is to copy something."""
        return bool(self._spills or self._fills)

    def blocks_to_spill(self) -> Collection[BlockId]:
        """Those that the plan that is being made copies out."""
        return self._spills.values()

    def blocks_to_fill(self) -> Iterable[BlockId]:
        """Those that the plan that is being made copies into."""
        return (block for _, block in self._fills)

    def check(self, device: Collection[BlockHash], pinned: Iterable[HostSlot]) -> None:
        """Re-add the books. `device` is all that device memory holds, `pinned` has every slot once for each copy of an
        open plan. Raises AssertionError naming what is off."""
        slots, free = list(self._slots.values()), set(self._free)
        assert self._slots.keys() == self._sole.keys() | self._spare.keys(), "a slot has a name that is not here"
        assert self._sole.keys().isdisjoint(device) and self._spare.keys() <= set(device), (
            "sole is spare, or spare sole"
        )
        everything = [*slots, *free, *self._unnamed]
        assert sorted(everything) == list(range(self._num_used)) and len(free) == len(self._free), "a slot is amiss"
        assert self._pins == Counter([*pinned, *(slot for slot, _ in self._fills)]), f"pins are {self._pins}"
        assert self._unnamed <= self._pins.keys() and free.isdisjoint(self._pins), "a slot is free and copied"
        assert set(self._spills) <= set(slots), "a copy goes out to no name"
        children: dict[BlockHash, set[BlockHash]] = {}
        later = set(device)
        for name, parent in reversed(self._sole.items()):
            assert parent is None or parent in later, f"{name.hex()} is present without its parent"
            later.add(name)
            if parent is not None:
                children.setdefault(parent, set()).add(name)
        assert children == self._children, "children and parents differ"

    def __repr__(self) -> str:
        return f"<host pool {self.num_slots} slots: {len(self._sole)} sole, {len(self._spare)} spare>"

    def _make_room(self, facts: list[KVFact]) -> tuple[HostSlot | None, tuple[BlockId, ...]]:
        """A slot that nothing is in, and the block that was to be copied there if there was one. None while plans that
        are open need what there is."""
        if self._free:
            return self._free.pop(), ()
        if self._num_used < self.num_slots:
            self._num_used += 1
            return HostSlot(self._num_used - 1), ()
        name = self._oldest()
        if name is None:
            return None, ()
        if name in self._spare:
            del self._spare[name]
        else:
            self._remove_sole(name)
            facts.append(BlockEvicted(name))
        dropped = self._vacate(name)
        return self._free.pop(), dropped

    def _oldest(self) -> BlockHash | None:
        """Whose slot is reused next; one that was never copied to may be."""
        for names in (self._spare, self._sole):
            name = next(iter(names), None)
            if name is not None and self._slots[name] not in self._pins:
                return name
        return None

    def _lose(self, name: BlockHash) -> OffloadDecision:
        """Forget the sole names that come after one that is lost, each before its parent."""
        lost = [name]
        for one in lost:
            lost += self._children.get(one, ())
        dropped: list[BlockId] = []
        for one in reversed(lost[1:]):
            self._remove_sole(one)
            dropped += self._vacate(one)
        return OffloadDecision([BlockEvicted(one) for one in reversed(lost)], False, tuple(dropped))

    def _vacate(self, name: BlockHash) -> tuple[BlockId, ...]:
        """Take a name off its slot; returns the block that was to be copied there, if there was one."""
        slot = self._slots.pop(name)
        (self._unnamed.add if slot in self._pins else self._free.append)(slot)
        block = self._spills.pop(slot, None)
        return () if block is None else (block,)

    def _add_sole(self, name: BlockHash, parent: BlockHash | None) -> None:
        self._sole[name] = parent
        if parent is not None:
            self._children.setdefault(parent, set()).add(name)

    def _remove_sole(self, name: BlockHash) -> None:
        parent = self._sole.pop(name)
        if parent is not None:
            siblings = self._children[parent]
            siblings.remove(name)
            if not siblings:
                del self._children[parent]
