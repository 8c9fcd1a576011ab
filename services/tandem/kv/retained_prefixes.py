"""Record which cached prefixes tenants want to keep, and until when; the pool reuses their blocks last.

Each retained block counts for the tenant that retains it. A tenant retains the leading blocks of a prefix, and its
retentions of a prefix end from the last block to the first, so a parent is retained at least as long as its children.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tandem.core.ids import BlockHash, TenantId


class RetainedPrefixes:
    """Record which block hashes are retained for which tenant and until when, at most `max_blocks` retentions in all.

    A retention is one hash for one tenant, so a hash that two tenants retain counts twice. Times are seconds of the
    caller's clock. A new retention may need room:
    - If its tenant has reached its own limit, the retention of this tenant that ends first is ended.
    - If `max_blocks` is reached, the tenant with the most retentions loses the one that ends first, provided that it
      has at least two more than the tenant of the new retention. Otherwise the tenant of the new one loses its own that
      ends first.

    A tenant never loses a retention to a new one of its own that ends earlier or at the same time; the new one is then
    not made.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._until: dict[TenantId, dict[BlockHash, float]] = {}
        # By tenant: end, minus the place in its prefix, and hash. An entry whose end is not that of `_until` is stale.
        self._ends: dict[TenantId, list[tuple[float, int, BlockHash]]] = {}
        self._tenants: dict[BlockHash, set[TenantId]] = {}
        self._num_blocks = 0

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._tenants

    def __len__(self) -> int:
        """Count the retained hashes, once for each tenant that retains them."""
        return self._num_blocks

    def num_of(self, tenant: TenantId) -> int:
        return len(self._until.get(tenant, ()))

    def retain(
        self, tenant: TenantId, hashes: Sequence[BlockHash], until: float, max_blocks: int = 0
    ) -> tuple[list[BlockHash], list[BlockHash]]:
        """Retain the leading `hashes` of a prefix for `tenant` until the time `until`, as many as there is room for. If
        the tenant already retains a hash for longer, this retention is not changed.

        `max_blocks`: most hashes that the tenant may retain; 0: no limit of its own. Returns two lists: the hashes that
        no tenant retained before, in the order of `hashes`; and the hashes that no tenant retains any more, because
        their retentions were ended to make room, with the last ones of a prefix first.
        """
        mine, ends = self._until.setdefault(tenant, {}), self._ends.setdefault(tenant, [])
        for place, block_hash in enumerate(hashes):
            if mine.get(block_hash, until) < until:
                mine[block_hash] = until
                heapq.heappush(ends, (until, -place, block_hash))
        fresh: list[BlockHash] = []
        lost: list[BlockHash] = []
        for place, block_hash in enumerate(hashes):
            if block_hash in mine:
                continue
            if not self._make_room(tenant, until, max_blocks, lost):
                break
            mine[block_hash] = until
            heapq.heappush(ends, (until, -place, block_hash))
            self._num_blocks += 1
            tenants = self._tenants.setdefault(block_hash, set())
            if not tenants:
                fresh.append(block_hash)
            tenants.add(tenant)
        self._tidy(tenant)
        # Another tenant may have lost a hash to make room for this one.
        both = set(fresh).intersection(lost)
        return [x for x in fresh if x not in both], [x for x in lost if x not in both]

    def expire(self, now: float) -> list[BlockHash]:
        """End the retentions that last until `now` or earlier, and return the hashes that no tenant retains any more,
        with the last ones of a prefix first."""
        lost: list[BlockHash] = []
        for tenant in list(self._ends):
            while (first := self._first(tenant)) is not None and first[0] <= now:
                self._end(tenant, first[2], lost)
            self._tidy(tenant)
        return lost

    def forget(self, block_hash: BlockHash) -> None:
        """End all retentions of a hash whose content is gone."""
        for tenant in self._tenants.pop(block_hash, ()):
            del self._until[tenant][block_hash]
            self._num_blocks -= 1
            self._tidy(tenant)

    def check(self) -> None:
        """Raise AssertionError when the counts differ from the retentions."""
        tenants: dict[BlockHash, set[TenantId]] = {}
        for tenant, mine in self._until.items():
            for block_hash in mine:
                tenants.setdefault(block_hash, set()).add(tenant)
        assert tenants == self._tenants, "tenants of hashes differ"
        assert sum(map(len, self._until.values())) == self._num_blocks <= self._max_blocks, repr(self)
        for tenant, mine in self._until.items():
            assert len(self._ends[tenant]) <= _most_ends(len(mine)), f"stale ends of {tenant}"
            ends = {(until, block_hash) for until, _, block_hash in self._ends[tenant]}
            assert mine and ends >= {(until, block_hash) for block_hash, until in mine.items()}, f"ends of {tenant}"

    def __repr__(self) -> str:
        return f"<{self._num_blocks} retained blocks of {len(self._until)} tenants>"

    def _make_room(self, tenant: TenantId, until: float, max_blocks: int, lost: list[BlockHash]) -> bool:
        """Return whether `tenant` may retain one more hash until `until`; end another retention for it where needed."""
        loser = tenant
        if not max_blocks or self.num_of(tenant) < max_blocks:
            if self._num_blocks < self._max_blocks:
                return True
            most = max(self._until, key=self.num_of, default=tenant)
            loser = most if self.num_of(most) > self.num_of(tenant) + 1 else tenant
        first = self._first(loser)
        if first is None or (loser is tenant and first[0] >= until):
            return False
        self._end(loser, first[2], lost)
        if loser is not tenant:
            self._tidy(loser)
        return True

    def _first(self, tenant: TenantId) -> tuple[float, int, BlockHash] | None:
        """Return the entry (end, minus the place in the prefix, hash) of a tenant's retention that ends first; of one
        prefix that of the last block. None if the tenant has no retention."""
        ends, mine = self._ends[tenant], self._until[tenant]
        while ends and mine.get(ends[0][2]) != ends[0][0]:
            heapq.heappop(ends)
        return ends[0] if ends else None

    def _end(self, tenant: TenantId, block_hash: BlockHash, lost: list[BlockHash]) -> None:
        del self._until[tenant][block_hash]
        self._num_blocks -= 1
        tenants = self._tenants[block_hash]
        tenants.remove(tenant)
        if not tenants:
            del self._tenants[block_hash]
            lost.append(block_hash)

    def _tidy(self, tenant: TenantId) -> None:
        """Forget a tenant that retains nothing, and keep the ends of others from growing with each renewal."""
        mine, ends = self._until[tenant], self._ends[tenant]
        if not mine:
            del self._until[tenant], self._ends[tenant]
        elif len(ends) > _most_ends(len(mine)):
            ends[:] = {end for end in ends if mine.get(end[2]) == end[0]}
            heapq.heapify(ends)


def _most_ends(num_retained: int) -> int:
    """Return how many ends a tenant with so many hashes may have, stale ones included."""
    return 2 * num_retained + 64
