"""The blocks that one worker holds, by name, in little memory; never knows the worker or the order of blocks.

An open-addressing table of words (`kv.prefix_word`) with linear probing: names are bits of a hash, so a name's low bits
say where it belongs. A set of Python integers takes 70 bytes per block, this 13 to 27, and a look four times as long
(`python -m loadtest index`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from tandem.core.ids import BlockHash
from tandem.kv.kv_event_codec import GONE, TIER_BITS, TIER_MASK, WORD_BYTES, short_hash

_FULL = 0.6
"""Of all slots; beyond it a look at a name that is not here takes more than four probes."""
_MIN_SLOTS = 16


class PrefixChain:
    """Names of a prompt's indexed blocks, which are each `stride`-th, counted from 1; worked out when asked for."""

    __slots__ = ("_hashes", "_stride", "names")

    def __init__(self, hashes: Sequence[BlockHash], stride: int) -> None:
        self._hashes = hashes
        self._stride = stride
        self.names = [0] * (len(hashes) // stride + 1)
        """By position; 0 where nobody has asked."""

    def name(self, position: int) -> int:
        name = self.names[position] = short_hash(self._hashes[position * self._stride - 1])
        return name

    def __len__(self) -> int:
        return len(self.names) - 1


class CompactBlockSet:
    """Tier by name. `capacity`: blocks for which there is room before the table grows, which takes some 0.3 us for each
    block that it holds."""

    __slots__ = ("_mask", "_most", "_num", "_slots")

    def __init__(self, capacity: int = 0) -> None:
        self._allocate(capacity)

    def tier(self, name: int) -> int:
        """Where the block lies; GONE where it does not."""
        slots, mask = self._slots, self._mask
        i = name >> TIER_BITS & mask
        while word := slots[i]:
            if word & ~TIER_MASK == name:
                return word & TIER_MASK
            i = i + 1 & mask
        return 0

    def leading(self, chain: PrefixChain, least: int, most: int, ends: Sequence[int]) -> tuple[int, int]:
        """How many leading blocks of `chain`, at most `most`, lie in tier `least` or better, and in which the last of
        them does, by bisection: first among `ends`, at least one position and ascending, where chains have ended
        elsewhere, then right behind the end that was found, then in between. Device memory may have holes, which a
        bisection may miss.

        `tier` is written out here: calls would be most of what a look costs.
        """
        slots, mask, names = self._slots, self._mask, chain.names
        low, high, found = 0, most + 1, GONE  # it has the block at `low`, if any, and not the one at `high`
        first, middle, last = 0, 0, len(ends)
        while high - low > 1:
            if first < last:
                middle = first + last >> 1
                probe = ends[middle]
            else:
                probe = low + 1 if first and low == ends[first - 1] else low + high >> 1
            name = names[probe] or chain.name(probe)
            i = name >> TIER_BITS & mask
            while (word := slots[i]) and word ^ name > TIER_MASK:
                i = i + 1 & mask
            if (tier := word & TIER_MASK) >= least:
                low, found, first = probe, tier, middle + 1
            else:
                high, last = probe, middle
        return low, found

    def write(self, words: Iterable[int]) -> None:
        """Put each block where its word says, in order."""
        for word in words:
            if word & TIER_MASK:
                self._put(word)
            else:
                self._remove(word)

    def slots(self) -> array[int]:
        """A copy of the table: the words, and 0 in between."""
        return self._slots[:]

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        return len(self._slots) * WORD_BYTES

    def check(self) -> None:
        """Raises AssertionError naming what is off."""
        words = list(self)
        assert len(words) == self._num, f"{len(words)} blocks, counted {self._num}"
        for word in words:
            assert self.tier(word & ~TIER_MASK) == word & TIER_MASK, f"{word:#x} cannot be found"

    def __iter__(self) -> Iterator[int]:
        """The words, in no order."""
        return (word for word in self._slots if word)

    def __len__(self) -> int:
        return self._num

    def __repr__(self) -> str:
        return f"<{self._num} blocks in {len(self._slots)} slots>"

    def _allocate(self, capacity: int) -> None:
        size = max(_MIN_SLOTS, 1 << int(capacity / _FULL).bit_length())
        self._slots = array("Q", bytes(WORD_BYTES * size))
        self._mask = size - 1
        self._most = int(size * _FULL)
        self._num = 0

    def _put(self, word: int) -> None:
        slots, mask = self._slots, self._mask
        i = word >> TIER_BITS & mask
        while held := slots[i]:
            if (held ^ word) <= TIER_MASK:
                slots[i] = word
                return
            i = i + 1 & mask
        slots[i] = word
        self._num += 1
        if self._num > self._most:
            self._grow()

    def _remove(self, name: int) -> None:
        slots, mask = self._slots, self._mask
        i = name >> TIER_BITS & mask
        while held := slots[i]:
            if held & ~TIER_MASK == name:
                self._num -= 1
                return self._close_up(i)
            i = i + 1 & mask
        return None

    def _close_up(self, hole: int) -> None:
        """Empty a slot, and move into it what could not be found beyond an empty one."""
        slots, mask = self._slots, self._mask
        i = hole
        while True:
            i = i + 1 & mask
            word = slots[i]
            if not word:
                break
            home = word >> TIER_BITS & mask
            if (i - home & mask) >= (i - hole & mask):
                slots[hole] = word
                hole = i
        slots[hole] = 0

    def _grow(self) -> None:
        words = list(self)
        self._allocate(self._num)  # one more than there is room for
        for word in words:
            self._put(word)
