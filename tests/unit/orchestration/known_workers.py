"""Provide the workers of a director under test; bookings are kept in plain dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tandem.core.events import KVReceived
from tandem.core.ids import RequestId, WorkerRef
from tandem.core.request import Job
from tandem.routing.placement import Placement
from tandem.routing.router import BY_COST
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import Pair, WorkerView


class BookedWorkers:
    """Implement KnownWorkers over views that the test sets; all pairs of them are linked."""

    routing = BY_COST

    def __init__(self, views: Sequence[WorkerView] = ()) -> None:
        self.views = {view.ref: view for view in views}
        self._linked: set[Pair] = {(a, b) for a in self.views for b in self.views if a != b}
        self._ranking = WorkerRanking(self._linked, set())
        self.inflight: dict[tuple[WorkerRef, RequestId], int] = {}
        self.jobs: list[Job] = []
        self.transfers: list[KVReceived] = []
        for ref in self.views:
            self._put(ref)

    def candidates(self) -> WorkerRanking:
        return self._ranking

    def add_inflight(self, worker: WorkerRef, request: RequestId, num_tokens: int) -> None:
        if num_tokens:
            self.inflight[worker, request] = num_tokens
        else:
            self.inflight.pop((worker, request), None)

    def add_inflight_job(self, worker: WorkerRef, job: Job) -> None:
        self.jobs.append(job)

    def measured(self, placement: Placement, pulled: KVReceived) -> None:
        self.transfers.append(pulled)

    def remove(self, worker: WorkerRef) -> None:
        self.views.pop(worker, None)
        self._ranking.remove(worker)
        self._linked -= {pair for pair in self._linked if worker in pair}

    def add(self, view: WorkerView) -> None:
        self._linked |= {pair for other in self.views for pair in ((other, view.ref), (view.ref, other))}
        self.views[view.ref] = view
        self._put(view.ref)

    def set_load(self, worker: WorkerRef, num_free_blocks: int) -> WorkerView:
        view = self.views[worker]
        self.views[worker] = replace(view, load=replace(view.load, num_free_blocks=num_free_blocks))
        self._put(worker)
        return self.views[worker]

    def _put(self, ref: WorkerRef) -> None:
        self._ranking.put(lambda: self.views[ref])
