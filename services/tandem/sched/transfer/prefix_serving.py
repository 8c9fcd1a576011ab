"""Serve cached prefix blocks to other workers: choose the blocks, hold them, and have plans digest them.

Leases are opened and ended in the engine. Blocks that are only in host memory are not served: bringing them back would
take room from this worker's own requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tandem.core.ids import BlockId, HandoffKey
from tandem.kv.handoff import BlockDigest, RemotePrefixRequest
from tandem.sched.state.limits import may_offer
from tandem.sched.state.scheduler_state import SchedulerState

Digest = tuple[BlockId, int]
"""A block and its index in the prompt."""


class PrefixServer:
    """Own the blocks of served prefix fetches that are still to be digested. `has_work`: there are such blocks.

    Prefix fetches are digested whatever `digest_handoffs` says, because the plan that digests a block also waits for
    its copy from host memory.

    Serving leaves free what the largest reserved pull needs, as every lease does (`may_offer`), and the block that each
    running sequence may need next. It cannot deadlock: the consumer had room before it sent the request, and the lease
    expires.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._pool = state.pool
        self._waiting: dict[HandoffKey, deque[Digest]] = {}
        self._open: dict[int, list[tuple[HandoffKey, int]]] = {}
        self._done: list[tuple[HandoffKey, tuple[BlockDigest, ...]]] = []
        self._last_number = -2

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def is_due(self, number: int) -> bool:
        """Return whether plan `number` is to digest and do nothing else, so that a consumer need not wait until a long
        step is over. At most every second plan is, so that running sequences go on."""
        return self.has_work and number > self._last_number + 1

    def serve(self, key: HandoffKey, prefix_request: RemotePrefixRequest) -> tuple[BlockId, ...]:
        """Hold, as leased, the leading requested blocks that are cached here and return them; none if the consumer has
        all of them.

        The result begins with the blocks that the consumer already has, because later blocks depend on them.
        """
        blocks = self._within_room(self._pool.cached(prefix_request.hashes))
        if len(blocks) <= prefix_request.first_index:
            return ()
        self._pool.retain_for_lease(blocks)
        places = enumerate(blocks[prefix_request.first_index :], prefix_request.first_index)
        self._waiting[key] = deque((block, place) for place, block in places)
        return blocks

    def drop(self, key: HandoffKey) -> None:
        """Forget a prefix fetch that has ended."""
        self._waiting.pop(key, None)

    def take(self, number: int, limit: int) -> tuple[Digest, ...]:
        """Return at most `limit` blocks that plan `number` is to digest, in the order in which the fetches arrived."""
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
        """Record the digests of a finished plan: all that were taken for it, or none where the plan failed."""
        first = 0
        for key, count in self._open.pop(number, ()):
            self._done.append((key, tuple(digests[first : first + count])))
            first += count

    def take_done(self) -> list[tuple[HandoffKey, tuple[BlockDigest, ...]]]:
        """Return the digests made since the last call. Their fetches may have ended meanwhile; an entry without digests
        failed."""
        done, self._done = self._done, []
        return done

    def __repr__(self) -> str:
        return f"<prefix server, {sum(map(len, self._waiting.values()))} blocks to digest>"

    def _within_room(self, blocks: tuple[BlockId, ...]) -> tuple[BlockId, ...]:
        """Return the leading blocks that can be held without taking room from reserved pulls or running sequences."""
        largest = self._state.largest_reservation
        num_spare = self._pool.num_free - len(self._state.running)
        num_leased = num_taken = 0
        for i, block in enumerate(blocks):
            holders = self._pool.holders(block)
            num_leased += not holders[1]
            num_taken += not any(holders)
            fits = may_offer(num_leased, self._pool.num_leased, self._pool.num_blocks, largest)
            if not fits or (num_taken and num_taken > num_spare):
                return blocks[:i]
        return blocks
