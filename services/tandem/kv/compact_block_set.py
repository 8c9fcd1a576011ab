"""Hold the blocks that one worker caches, by short hash and with their memory tier, in little memory.

The set is an open-addressing table with linear probing. Its entries are the 64-bit words of `kv.kv_event_codec`: 62
bits of a block's hash (the short hash) and two bits of tier. The low bits of the short hash give the slot. The set
takes 13 to 27 bytes per block, where a set of Python integers takes 70, but a lookup takes four times as long (`python
-m loadtest index`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from tandem.core.ids import BlockHash
from tandem.kv.kv_event_codec import GONE, TIER_BITS, TIER_MASK, WORD_BYTES, short_hash

_FULL = 0.6
"""Highest fraction of slots in use; beyond it a lookup of an absent short hash takes more than four probes."""
_MIN_SLOTS = 16


class PrefixChain:
    """Compute the short hashes of one prompt's blocks by position, each on its first use.

    `hashes`: hashes of all blocks of the prompt. `stride`: the prefix index holds only the `stride`-th, `2 *
    stride`-th, ... block. Positions count these indexed blocks from 1, and `len` is their number.
    """

    __slots__ = ("_hashes", "_stride", "short_hashes")

    def __init__(self, hashes: Sequence[BlockHash], stride: int) -> None:
        self._hashes = hashes
        self._stride = stride
        self.short_hashes = [0] * (len(hashes) // stride + 1)
        """By position; 0 where the short hash was not computed yet."""

    def short_hash(self, position: int) -> int:
        """Compute the short hash of the indexed block at `position`, store it in `short_hashes`, and return it. Raises
        IndexError for a position past the end."""
        key = self.short_hashes[position] = short_hash(self._hashes[position * self._stride - 1])
        return key

    def __len__(self) -> int:
        return len(self.short_hashes) - 1


class CompactBlockSet:
    """Map short hashes of blocks to memory tiers.

    `capacity`: number of blocks for which the table has room before it must grow; growing takes some 0.3 us for each
    block in the set.
    """

    __slots__ = ("_mask", "_most", "_num", "_slots")

    def __init__(self, capacity: int = 0) -> None:
        self._allocate(capacity)

    def tier(self, key: int) -> int:
        """Return the memory tier of the block with the short hash `key`, or GONE if the set does not hold the block."""
        slots, mask = self._slots, self._mask
        i = key >> TIER_BITS & mask
        while word := slots[i]:
            if word & ~TIER_MASK == key:
                return word & TIER_MASK
            i = i + 1 & mask
        return 0

    def leading(self, chain: PrefixChain, least: int, most: int, ends: Sequence[int]) -> tuple[int, int]:
        """Count how many leading blocks of a prompt the set holds in memory tier `least` or better; return this count
        and the tier of the last of these blocks.

        - `chain`: short hashes of the prompt's indexed blocks. `most`: upper limit of the count.
        - `least`: HOST or DEVICE (`kv.kv_event_codec`).
        - `ends`: counts to try first, ascending, each at least 1: those of other workers for this prompt, since workers
          often hold the same prefix.

        Where the count is 0, the tier is GONE. The count is found by bisection: first among `ends`, then directly
        behind the greatest of them that was found to be held, then between the remaining bounds. So a missing block may
        be overlooked if blocks after it are held. The body of `tier` is inlined here, because calls would take most of
        the lookup time.
        """
        slots, mask, short_hashes = self._slots, self._mask, chain.short_hashes
        # Invariant: the block at `low` (0: none) is held, the block at `high` is not.
        low, high, found = 0, most + 1, GONE
        first, middle, last = 0, 0, len(ends)
        while high - low > 1:
            if first < last:
                middle = first + last >> 1
                probe = ends[middle]
            else:
                probe = low + 1 if first and low == ends[first - 1] else low + high >> 1
            key = short_hashes[probe] or chain.short_hash(probe)
            i = key >> TIER_BITS & mask
            while (word := slots[i]) and word ^ key > TIER_MASK:
                i = i + 1 & mask
            if (tier := word & TIER_MASK) >= least:
                low, found, first = probe, tier, middle + 1
            else:
                high, last = probe, middle
        return low, found

    def write(self, words: Iterable[int]) -> None:
        """Apply words (`kv.kv_event_codec`) in order: each sets the tier of its block, and a word with tier GONE
        removes the block."""
        for word in words:
            if word & TIER_MASK:
                self._put(word)
            else:
                self._remove(word)

    def slots(self) -> array[int]:
        """Return a copy of the hash table: a word in each used slot, 0 in each empty slot."""
        return self._slots[:]

    @property
    def num_bytes(self) -> int:
        """Return the size of the table in memory, in bytes."""
        return len(self._slots) * WORD_BYTES

    def check(self) -> None:
        """Raise AssertionError when the number of blocks was miscounted or a block of the table cannot be found."""
        words = list(self)
        assert len(words) == self._num, f"{len(words)} blocks, counted {self._num}"
        for word in words:
            assert self.tier(word & ~TIER_MASK) == word & TIER_MASK, f"{word:#x} cannot be found"

    def __iter__(self) -> Iterator[int]:
        """Iterate over the words in no particular order."""
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

    def _remove(self, key: int) -> None:
        slots, mask = self._slots, self._mask
        i = key >> TIER_BITS & mask
        while held := slots[i]:
            if held & ~TIER_MASK == key:
                self._num -= 1
                return self._close_up(i)
            i = i + 1 & mask
        return None

    def _close_up(self, hole: int) -> None:
        """Empty a slot, and move later words forward that could no longer be found behind an empty slot."""
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
