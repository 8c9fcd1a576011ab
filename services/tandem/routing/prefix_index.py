"""Which worker holds how much of a prompt, over all workers; never asks one and never hashes a prompt.

Presence implies parents (`kv.pool`): a worker that holds a block holds every block before it. So what it holds of a
prompt is found by bisection, in O(log n) looks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tandem.core.events import KVFact
from tandem.core.ids import BlockHash, WorkerRef
from tandem.kv.compact_block_set import CompactBlockSet, PrefixChain
from tandem.kv.kv_event_codec import DEVICE, HOST, encode_event


class PrefixHit(NamedTuple):
    """Leading blocks of a prompt that a worker holds in any tier, and of these the leading ones in device memory. Both
    are hints: facts are some milliseconds old."""

    num_blocks: int
    num_device_blocks: int


class PrefixTable:
    """`stride`: only each `stride`-th block of a chain is in the table, so hits are multiples of it."""

    def __init__(self, stride: int = 1) -> None:
        if stride < 1:
            raise ValueError(f"stride must be at least 1, got {stride}")
        self.stride = stride
        self._held: dict[WorkerRef, CompactBlockSet] = {}

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerRef, PrefixHit]:
        """What each worker holds of the chain `hashes`; those that hold nothing are left out."""
        hits: dict[WorkerRef, PrefixHit] = {}
        chain = PrefixChain(hashes, self.stride)
        if not (most := len(chain)):
            return hits
        first, ends = chain.short_hash(1), [most]
        for worker, held in self._held.items():
            if not held.tier(first):
                continue
            num, tier = held.leading(chain, HOST, most, ends)
            num_device = num if tier == DEVICE else held.leading(chain, DEVICE, num, [num])[0]
            hits[worker] = PrefixHit(num * self.stride, num_device * self.stride)
            # Often workers hold the same; where they do not, each end halves what is left to look at.
            place = bisect_left(ends, num)
            if ends[place] != num:
                ends.insert(place, num)
        return hits

    def apply(self, worker: WorkerRef, facts: Iterable[KVFact]) -> None:
        """Take in what became of a worker's blocks, in order."""
        self.write(worker, map(encode_event, facts))

    def write(self, worker: WorkerRef, words: Iterable[int]) -> None:
        """`apply` of facts that are words already."""
        held = self._held.get(worker)
        if held is None:
            held = self._held[worker] = CompactBlockSet()
        held.write(words)

    def load(self, worker: WorkerRef, held: CompactBlockSet) -> None:
        """Replace all that is known of a worker. The table owns `held` from then on."""
        self._held[worker] = held

    def drop(self, worker: WorkerRef) -> None:
        """Forget a worker; nothing when it is not here."""
        self._held.pop(worker, None)

    def held(self, worker: WorkerRef) -> CompactBlockSet | None:
        """What is known of a worker, to be read only."""
        return self._held.get(worker)

    @property
    def num_workers(self) -> int:
        return len(self._held)

    @property
    def num_blocks(self) -> int:
        """Counted for each worker that holds them."""
        return sum(map(len, list(self._held.values())))

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        return sum(held.num_bytes for held in list(self._held.values()))

    def __repr__(self) -> str:
        return f"<prefixes of {len(self._held)} workers, {self.num_blocks} blocks>"
