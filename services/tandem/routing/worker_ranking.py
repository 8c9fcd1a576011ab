"""Workers in the order in which a router prefers them, kept up to date one worker at a time; never places a request.

A placement looks at the first few of a heap, so it costs the logarithm of the number of workers where `ClusterView`
sorts them all. Both give the same order.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.routing.worker_view import Cost, Pair, Pool, Ranking, WorkerView, decode_cost, prefill_cost, whole_cost

Look = Callable[[], WorkerView]
STALE_SHARE = 4
"""A heap is built anew when it has so many times more entries than workers."""


@dataclass(eq=False, slots=True)
class _Worker:
    look: Look
    pool: Pool


class _Heap:
    """Entries are (cost, number, worker), and no worker's cost is less than that of its newest entry. So the first
    entry that still tells the truth is the least of all; others are put where they belong as they come up."""

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
        """By rising cost. Nothing may be put or removed before the iterator is closed."""
        seen: list[tuple[Cost, int, _Worker]] = []
        try:
            while self._entries:
                cost, number, worker = heapq.heappop(self._entries)
                if self._newest.get(worker) != number:
                    continue
                view = worker.look()
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
    """The workers that serve one model and take new work."""

    def __init__(self) -> None:
        self.workers: dict[WorkerRef, _Worker] = {}
        self.pools: Counter[Pool] = Counter()
        self.prefill_workers = _Heap(prefill_cost)
        self.decode_workers = _Heap(decode_cost)
        self.mixed_workers = _Heap(whole_cost)

    def put(self, view: WorkerView, look: Look) -> None:
        worker = self.workers.get(view.ref)
        if worker is None:
            worker = self.workers[view.ref] = _Worker(look, view.pool)
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
    """A router's `Candidates`. The sets of pairs are its owner's, as in `ClusterView`, and may change."""

    def __init__(self, linked: Set[Pair], unlinked: Set[Pair], refused: Set[Pair] = frozenset()) -> None:
        self.linked = linked
        self.unlinked = unlinked
        self.refused = refused
        self._markets: dict[str, _ModelWorkers] = {}
        self._models: dict[WorkerRef, str] = {}

    def put(self, look: Look) -> None:
        """A worker has come, or what is known of it has changed. `look` says what that is, at any time: it may become
        costlier without a word, but not cheaper, and keep its pool and model for as long as it stays."""
        view = look()
        if view.load.draining:
            self.remove(view.ref)
            return
        self._models[view.ref] = view.model
        self._markets.setdefault(view.model, _ModelWorkers()).put(view, look)

    def remove(self, ref: WorkerRef) -> None:
        """It takes no new work; nothing when it is not here."""
        model = self._models.pop(ref, None)
        if model is not None:
            self._markets[model].remove(ref)

    def pools(self, model: str) -> Counter[Pool]:
        return self._market(model).pools

    def find(self, model: str, ref: WorkerRef) -> WorkerView | None:
        worker = self._market(model).workers.get(ref)
        return None if worker is None else worker.look()

    def prefillers(self, model: str) -> list[WorkerView]:
        """All that prefill."""
        views = (worker.look() for worker in self._market(model).workers.values())
        return [view for view in views if view.prefills]

    def prefill_workers(self, model: str) -> Ranking:
        return self._market(model).prefill_workers.ranked()

    def decode_workers(self, model: str) -> Ranking:
        return self._market(model).decode_workers.ranked()

    def mixed_workers(self, model: str) -> Ranking:
        return self._market(model).mixed_workers.ranked()

    def _market(self, model: str) -> _ModelWorkers:
        return self._markets.get(model) or _ModelWorkers()
