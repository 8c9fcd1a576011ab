"""Find how much of a prompt each worker holds, without calling workers.

Presence implies parents (`kv.block_pool`): a worker that holds a block holds every block before it. So the length of
its prefix is found by bisection, in O(log n) lookups.
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
    """How many leading blocks of a prompt a worker holds.

    `num_blocks`: in device or host memory; the first `num_device_blocks` of them are in device memory. Both numbers are
    hints, because KV events arrive some milliseconds late.
    """

    num_blocks: int
    num_device_blocks: int


class PrefixTable:
    """Record which blocks each worker holds, and find the longest prefix of a prompt on each worker.

    `stride`: only every `stride`-th block of a prompt is recorded, so hits are multiples of it; at least 1, as
    `redis.index_stride`.
    """

    def __init__(self, stride: int = 1) -> None:
        self.stride = stride
        self._held: dict[WorkerRef, CompactBlockSet] = {}

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerRef, PrefixHit]:
        """Return how many leading blocks of a prompt each worker holds; workers that hold none are left out. `hashes`:
        the hashes of the prompt's full blocks, in order."""
        hits: dict[WorkerRef, PrefixHit] = {}
        chain = PrefixChain(hashes, self.stride)
        if not (most := len(chain)):
            return hits
        first = chain.short_hash(1)
        ends = [most]
        for worker, held in self._held.items():
            if not held.tier(first):
                continue
            num, tier = held.leading(chain, HOST, most, ends)
            num_device = num if tier == DEVICE else held.leading(chain, DEVICE, num, [num])[0]
            hits[worker] = PrefixHit(num * self.stride, num_device * self.stride)
            # Workers often hold the same prefix; where they differ, each known end narrows the search of the next.
            place = bisect_left(ends, num)
            if ends[place] != num:
                ends.insert(place, num)
        return hits

    def apply(self, worker: WorkerRef, facts: Iterable[KVFact]) -> None:
        """Apply KV events to the recorded blocks of a worker, in order; an unknown worker is added."""
        self.write(worker, map(encode_event, facts))

    def write(self, worker: WorkerRef, words: Iterable[int]) -> None:
        """Apply KV events to the recorded blocks of a worker, in order; an unknown worker is added. `words`: the
        events, each encoded as one integer by `encode_event`."""
        held = self._held.get(worker)
        if held is None:
            held = self._held[worker] = CompactBlockSet()
        held.write(words)

    def load(self, worker: WorkerRef, held: CompactBlockSet) -> None:
        """Replace the recorded blocks of a worker by `held`, which the caller must not change any more."""
        self._held[worker] = held

    def drop(self, worker: WorkerRef) -> None:
        """Forget the recorded blocks of a worker; does nothing when it is unknown."""
        self._held.pop(worker, None)

    def held(self, worker: WorkerRef) -> CompactBlockSet | None:
        """Return the recorded blocks of a worker, which the caller must not change; None when the worker is unknown."""
        return self._held.get(worker)

    @property
    def num_workers(self) -> int:
        return len(self._held)

    @property
    def num_blocks(self) -> int:
        """Return the number of recorded blocks; a block counts once for each worker that holds it."""
        return sum(map(len, list(self._held.values())))

    @property
    def num_bytes(self) -> int:
        """Return the memory that the table takes for the blocks of all workers, in bytes."""
        return sum(held.num_bytes for held in list(self._held.values()))

    def __repr__(self) -> str:
        return f"<prefixes of {len(self._held)} workers, {self.num_blocks} blocks>"
