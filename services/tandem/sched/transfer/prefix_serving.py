"""Which cached blocks another worker may read, and their digests, which plans work out; never opens or ends a lease.

Blocks that only host memory has are not lent: bringing them back would take room from what runs here for somebody
else's sake.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Sized

from tandem.core.ids import BlockId, HandoffKey, SeqId
from tandem.kv.block_pool import BlockPool
from tandem.kv.handoff import BlockDigest, RemotePrefixRequest
from tandem.sched.state.limits import may_offer

Digest = tuple[BlockId, int]
"""A block and its place in the prompt."""


class PrefixServer:
    """`has_work`: blocks of prefix fetches are still to be digested. Prefix fetches are digested whatever the setting:
    the plan that does it has brought back what was on its way from host memory.

    A prefix fetch never takes what the largest promised pull needs, as no lease does (`may_offer`), nor the block that
    each running sequence may need next. It ends by itself: its consumer had room for it before it asked, and its lease
    lapses.
    """

    def __init__(self, pool: BlockPool, running: Sized, promised: Mapping[SeqId, int]) -> None:
        self._pool = pool
        self._running = running
        self._promised = promised
        self._waiting: dict[HandoffKey, deque[Digest]] = {}
        self._open: dict[int, list[tuple[HandoffKey, int]]] = {}
        self._done: list[tuple[HandoffKey, tuple[BlockDigest, ...]]] = []
        self._last_number = -2

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def is_due(self, number: int) -> bool:
        """The plan of this number is to digest and to do nothing else, so that a consumer need not wait until a step is
        over; every second one, so that what runs goes on."""
        return self.has_work and number > self._last_number + 1

    def lend(self, key: HandoffKey, prefix_request: RemotePrefixRequest) -> tuple[BlockId, ...]:
        """As many leading blocks of what is asked for as are here and may be held, which are held as leased from now
        on; none where the consumer has all those. They begin with those that it has: what comes after them stands on
        them."""
        blocks = self._within_room(self._pool.cached(prefix_request.hashes))
        if len(blocks) <= prefix_request.first_index:
            return ()
        self._pool.retain_for_lease(blocks)
        places = enumerate(blocks[prefix_request.first_index :], prefix_request.first_index)
        self._waiting[key] = deque((block, place) for place, block in places)
        return blocks

    def drop(self, key: HandoffKey) -> None:
        """The prefix fetch has ended."""
        self._waiting.pop(key, None)

    def take(self, number: int, limit: int) -> tuple[Digest, ...]:
        """What this plan is to digest, at most `limit` blocks; the prefix fetches in the order in which they came."""
        taken: list[Digest] = []
        self._last_number = number if self.has_work else self._last_number
        for key, digests in list(self._waiting.items()):
            count = min(len(digests), limit - len(taken))
            if count <= 0:
                break
            taken += [digests.popleft() for _ in range(count)]
            self._open.setdefault(number, []).append((key, count))
            if not digests:
                del self._waiting[key]
        return tuple(taken)

    def committed(self, number: int, digests: Sequence[BlockDigest]) -> None:
        """What a plan has digested: all that it was to, or nothing where it failed."""
        first = 0
        for key, count in self._open.pop(number, ()):
            self._done.append((key, tuple(digests[first : first + count])))
            first += count

    def take_done(self) -> list[tuple[HandoffKey, tuple[BlockDigest, ...]]]:
        """What was digested since the last call, of prefix fetches that may have ended meanwhile; without blocks: it
        failed."""
        done, self._done = self._done, []
        return done

    def __repr__(self) -> str:
        return f"<lending, {sum(map(len, self._waiting.values()))} blocks to digest>"

    def _within_room(self, blocks: tuple[BlockId, ...]) -> tuple[BlockId, ...]:
        largest = max(self._promised.values(), default=0)
        num_spare = self._pool.num_free - len(self._running)
        num_leased = num_taken = 0
        for i, block in enumerate(blocks):
            holders = self._pool.holders(block)
            num_leased += not holders[1]
            num_taken += not any(holders)
            fits = may_offer(num_leased, self._pool.num_leased, self._pool.num_blocks, largest)
            if not fits or (num_taken and num_taken > num_spare):
                return blocks[:i]
        return blocks
