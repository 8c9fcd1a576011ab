"""Rank workers by load incrementally, one worker at a time.

A placement reads the first few entries of a heap, so its time grows with the logarithm of the number of workers.
Workers of one model that serve different sets of lanes are in different heaps, and a request reads the heaps of the
sets that contain its lane: a single one where all workers serve all lanes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import ExitStack, closing
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.config import Pool
from tandem.core.ids import WorkerRef
from tandem.core.lane import Lane
from tandem.routing.worker_view import Cost, Pair, Ranking, WorkerView, decode_cost, local_cost, prefill_cost

ViewGetter = Callable[[], WorkerView]
Lanes = frozenset[Lane]
STALE_SHARE = 4
"""A heap is rebuilt when it has this many times more entries than workers."""


@dataclass(eq=False, slots=True)
class _Worker:
    get_view: ViewGetter
    pool: Pool


class _Heap:
    """Heap of (cost, number, worker) entries. The current cost of a worker is never less than the cost in its newest
    entry.

    So the first entry whose cost is current is the least of all; outdated entries are pushed back with the current cost
    as they come up.
    """

    def __init__(self, cost: Callable[[WorkerView], Cost]) -> None:
        self._cost = cost
        self._entries: list[tuple[Cost, int, _Worker]] = []
        self._newest: dict[_Worker, int] = {}
        self._num_put = 0

    def put(self, worker: _Worker, view: WorkerView) -> None:
        self._num_put += 1
        self._newest[worker] = self._num_put
        heapq.heappush(self._entries, (self._cost(view), self._num_put, worker))
        if len(self._entries) > STALE_SHARE * len(self._newest) + STALE_SHARE:
            self._entries = [entry for entry in self._entries if self._newest.get(entry[2]) == entry[1]]
            heapq.heapify(self._entries)

    def remove(self, worker: _Worker) -> None:
        self._newest.pop(worker, None)

    def ranked(self) -> Ranking:
        """Yield the workers by rising cost. Nothing may be put or removed before the iterator is closed."""
        seen: list[tuple[Cost, int, _Worker]] = []
        try:
            while self._entries:
                cost, number, worker = heapq.heappop(self._entries)
                if self._newest.get(worker) != number:
                    continue
                view = worker.get_view()
                now = self._cost(view)
                if now != cost:
                    heapq.heappush(self._entries, (now, number, worker))
                    continue
                seen.append((cost, number, worker))
                yield view
        finally:
            for entry in seen:
                heapq.heappush(self._entries, entry)


class _WorkerGroup:
    """The workers that serve one model and the same lanes and take new work, in a heap for each role."""

    def __init__(self) -> None:
        self.workers: dict[WorkerRef, _Worker] = {}
        self.pools: Counter[Pool] = Counter()
        self.prefill_workers = _Heap(prefill_cost)
        self.decode_workers = _Heap(decode_cost)
        self.mixed_workers = _Heap(local_cost)

    def put(self, view: WorkerView, get_view: ViewGetter) -> None:
        worker = self.workers.get(view.ref)
        if worker is None:
            worker = self.workers[view.ref] = _Worker(get_view, view.pool)
            self.pools[view.pool] += 1
        if view.prefills:
            self.prefill_workers.put(worker, view)
        if view.decodes:
            self.decode_workers.put(worker, view)
        self.mixed_workers.put(worker, view)

    def remove(self, ref: WorkerRef) -> None:
        worker = self.workers.pop(ref, None)
        if worker is not None:
            self.pools[worker.pool] -= 1
            for heap in (self.prefill_workers, self.decode_workers, self.mixed_workers):
                heap.remove(worker)


class _GroupKey(NamedTuple):
    model: str
    lanes: Lanes


class WorkerRanking:
    """Rank the workers of each model by rising load, for each role, so that reading the first few is cheap.

    Contains only workers that take new work. Methods that take a model and a lane return only workers that serve both.
    `linked`: pairs (prefill, decode) of workers between which KV may move. `unlinked`: pairs whose test failed.
    `refused`: those of the `unlinked` pairs whose link misses its requirements. A pair in none of these is untested.
    The caller owns the three collections and may change them.

    Some methods return a ranking as an iterator. Until an iterator is closed, nothing may be changed, and the same
    ranking must not be opened again.
    """

    def __init__(self, linked: Set[Pair], unlinked: Set[Pair], refused: Set[Pair] = frozenset()) -> None:
        self.linked = linked
        self.unlinked = unlinked
        self.refused = refused
        self._absent: Set[WorkerRef] = frozenset()
        self._by_model: dict[str, dict[Lanes, _WorkerGroup]] = {}
        """Without empty groups."""
        self._keys: dict[WorkerRef, _GroupKey] = {}
        self._fingerprints: dict[WorkerRef, str] = {}
        """Of draining workers too."""

    def put(self, get_view: ViewGetter) -> None:
        """Add the worker that the function `get_view` returns, or update it after a change of its load; of a draining
        worker only the fingerprint stays.

        `get_view` must return the worker's current view at any time: between calls of `put` its load may rise but not
        fall, and its model and lanes stay the same. Its pool never changes.
        """
        view = get_view()
        self._fingerprints[view.ref] = view.fingerprint
        if view.load.draining:
            self._leave(view.ref)
            return
        key = _GroupKey(view.model, view.lanes)
        if self._keys.get(view.ref) != key:
            self._leave(view.ref)
            self._keys[view.ref] = key
            self._by_model.setdefault(view.model, {}).setdefault(view.lanes, _WorkerGroup())
        self._by_model[view.model][view.lanes].put(view, get_view)

    def remove(self, ref: WorkerRef) -> None:
        """Remove the worker `ref`, which takes no new work; does nothing when it is unknown."""
        self._fingerprints.pop(ref, None)
        self._leave(ref)

    def _leave(self, ref: WorkerRef) -> None:
        key = self._keys.pop(ref, None)
        if key is not None:
            groups = self._by_model[key.model]
            groups[key.lanes].remove(ref)
            if not groups[key.lanes].workers:
                del groups[key.lanes]

    def without(self, absent: Set[WorkerRef]) -> WorkerRanking:
        """Return a view of this ranking without the workers in `absent`; later changes of the ranking or of `absent`
        appear in it."""
        if not absent:
            return self
        ranking = copy(self)
        ranking._absent = self._absent | absent
        return ranking

    def lanes(self, model: str) -> Collection[Lanes]:
        """Return the different sets of lanes that workers of `model` serve; only one set where all workers serve the
        same lanes."""
        return self._by_model.get(model, {}).keys()

    def pools(self, model: str, lane: Lane) -> Counter[Pool]:
        """Return how many workers of `model` that serve `lane` are in each pool ("prefill", "decode", "mixed")."""
        groups = self._groups(model, lane)
        pools = groups[0].pools if len(groups) == 1 else sum((group.pools for group in groups), Counter[Pool]())
        if not self._absent:
            return pools
        return pools - Counter(
            group.workers[ref].pool for ref in self._absent for group in groups if ref in group.workers
        )

    def find(self, model: str, ref: WorkerRef) -> WorkerView | None:
        """Return the worker `ref` of `model`, whatever lanes it serves; None where it is unknown or left out by
        `without`."""
        if not self.contains(model, ref):
            return None
        return self._by_model[model][self._keys[ref].lanes].workers[ref].get_view()

    def contains(self, model: str, ref: WorkerRef) -> bool:
        """Return whether `find` returns the worker `ref` of `model`."""
        key = self._keys.get(ref)
        return key is not None and key.model == model and ref not in self._absent

    def fingerprint(self, ref: WorkerRef) -> str | None:
        """Return the fingerprint of a worker, which may be draining; None where it is unknown."""
        return self._fingerprints.get(ref)

    def serves(self, model: str, lane: Lane, ref: WorkerRef) -> bool:
        """Return whether the worker `ref` serves `model` and `lane`; False where it is unknown or left out by
        `without`."""
        return self.contains(model, ref) and lane in self._keys[ref].lanes

    def workers(self, model: str, lane: Lane) -> list[WorkerView]:
        """Return all workers of `model` that serve `lane`, in no particular order."""
        groups = self._groups(model, lane)
        views = (worker.get_view() for group in groups for worker in group.workers.values())
        return [view for view in views if view.ref not in self._absent]

    def prefillers(self, model: str, lane: Lane) -> list[WorkerView]:
        """Return all workers of `model` that serve `lane` and compute prompts, prefill and mixed workers, in no
        particular order."""
        return [view for view in self.workers(model, lane) if view.prefills]

    def views(self) -> Iterator[WorkerView]:
        """Yield all workers, of all models and lanes, in no particular order."""
        for groups in self._by_model.values():
            for group in groups.values():
                views = (worker.get_view() for worker in group.workers.values())
                yield from (view for view in views if view.ref not in self._absent)

    def prefill_workers(self, model: str, lane: Lane) -> Ranking:
        """Yield the prefill and mixed workers of `model` that serve `lane`, fewest queued prompt tokens first."""
        return self._present([group.prefill_workers for group in self._groups(model, lane)], prefill_cost)

    def decode_workers(self, model: str, lane: Lane) -> Ranking:
        """Yield the decode and mixed workers of `model` that serve `lane`, fewest sequences first."""
        return self._present([group.decode_workers for group in self._groups(model, lane)], decode_cost)

    def mixed_workers(self, model: str, lane: Lane) -> Ranking:
        """Yield all workers of `model` that serve `lane`, as each can run a whole request: decode and mixed workers
        first, then prefill workers, both by rising number of queued prompt tokens."""
        return self._present([group.mixed_workers for group in self._groups(model, lane)], local_cost)

    def _present(self, heaps: Sequence[_Heap], cost: Callable[[WorkerView], Cost]) -> Ranking:
        with closing(heaps[0].ranked() if len(heaps) == 1 else _merged(heaps, cost)) as views:
            for view in views:
                if view.ref not in self._absent:
                    yield view

    def _groups(self, model: str, lane: Lane) -> list[_WorkerGroup]:
        return [group for lanes, group in self._by_model.get(model, {}).items() if lane in lanes]


def _merged(heaps: Sequence[_Heap], cost: Callable[[WorkerView], Cost]) -> Ranking:
    with ExitStack() as opened:
        yield from heapq.merge(*(opened.enter_context(closing(heap.ranked())) for heap in heaps), key=cost)
