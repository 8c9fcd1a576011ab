"""Rank workers by load incrementally, one worker at a time.

A placement reads the first few entries of a heap, so it costs the logarithm of the number of workers.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Set
from contextlib import closing
from copy import copy
from dataclasses import dataclass

from tandem.core.config import Pool
from tandem.core.ids import WorkerRef
from tandem.routing.worker_view import Cost, Pair, Ranking, WorkerView, decode_cost, local_cost, prefill_cost

ViewGetter = Callable[[], WorkerView]
STALE_SHARE = 4
"""A heap is rebuilt when it has this many times more entries than workers."""


@dataclass(eq=False, slots=True)
class _Worker:
    get_view: ViewGetter
    pool: Pool


class _Heap:
    """Heap of (cost, number, worker) entries in which no worker's cost is less than that of its newest entry.

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


class _ModelWorkers:
    """The workers that serve one model and take new work, in a heap for each role."""

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


class WorkerRanking:
    """Rank the workers of each model by rising load, for each role, so that reading the first few is cheap.

    Contains only workers that take new work. `linked`: (prefill, decode) pairs between which KV may move. `unlinked`:
    pairs whose test failed. `refused`: those of `unlinked` whose link misses its requirements. A pair in none of these
    is untested. The caller owns the three and may change them.

    The rankings returned are iterators. Until an iterator is closed, nothing may be changed, and the same ranking must
    not be opened again.
    """

    def __init__(self, linked: Set[Pair], unlinked: Set[Pair], refused: Set[Pair] = frozenset()) -> None:
        self.linked = linked
        self.unlinked = unlinked
        self.refused = refused
        self._absent: Set[WorkerRef] = frozenset()
        self._by_model: dict[str, _ModelWorkers] = {}
        self._models: dict[WorkerRef, str] = {}

    def put(self, get_view: ViewGetter) -> None:
        """Add the worker that `get_view` returns, or update it after a change of its load; a draining worker is
        removed.

        `get_view` must return the worker's current view at any time: between calls of `put` its load may rise but not
        fall, and its pool and model stay the same.
        """
        view = get_view()
        if view.load.draining:
            self.remove(view.ref)
            return
        self._models[view.ref] = view.model
        self._by_model.setdefault(view.model, _ModelWorkers()).put(view, get_view)

    def remove(self, ref: WorkerRef) -> None:
        """Remove a worker that takes no new work; does nothing when it is unknown."""
        model = self._models.pop(ref, None)
        if model is not None:
            self._by_model[model].remove(ref)

    def without(self, absent: Set[WorkerRef]) -> WorkerRanking:
        """Return a view of this ranking without the workers in `absent`; later changes of the ranking or of `absent`
        appear in it."""
        if not absent:
            return self
        ranking = copy(self)
        ranking._absent = self._absent | absent
        return ranking

    def pools(self, model: str) -> Counter[Pool]:
        """Return the number of workers of `model` in each pool ("prefill", "decode", "mixed")."""
        workers = self._workers_of(model)
        absent = (workers.workers[ref].pool for ref in self._absent if ref in workers.workers)
        return workers.pools - Counter(absent) if self._absent else workers.pools

    def find(self, model: str, ref: WorkerRef) -> WorkerView | None:
        worker = self._workers_of(model).workers.get(ref)
        return None if worker is None or ref in self._absent else worker.get_view()

    def prefillers(self, model: str) -> list[WorkerView]:
        """Return all workers of `model` that compute prompts, in no particular order."""
        views = (worker.get_view() for worker in self._workers_of(model).workers.values())
        return [view for view in views if view.prefills and view.ref not in self._absent]

    def prefill_workers(self, model: str) -> Ranking:
        """Yield the workers of `model` that compute prompts, least loaded first."""
        return self._present(self._workers_of(model).prefill_workers)

    def decode_workers(self, model: str) -> Ranking:
        """Yield the workers of `model` that decode, least loaded first."""
        return self._present(self._workers_of(model).decode_workers)

    def mixed_workers(self, model: str) -> Ranking:
        """Yield all workers of `model`, to run whole requests: those that decode first, then those of the prefill pool,
        each least loaded first."""
        return self._present(self._workers_of(model).mixed_workers)

    def _present(self, heap: _Heap) -> Ranking:
        with closing(heap.ranked()) as views:
            for view in views:
                if view.ref not in self._absent:
                    yield view

    def _workers_of(self, model: str) -> _ModelWorkers:
        return self._by_model.get(model) or _ModelWorkers()
