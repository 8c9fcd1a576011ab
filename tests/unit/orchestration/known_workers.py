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
        self.views: dict[WorkerRef, WorkerView] = {}
        self._linked: set[Pair] = set()
        self._ranking = WorkerRanking(self._linked, set())
        self.inflight: dict[tuple[WorkerRef, RequestId], int] = {}
        for view in views:
            self.add(view)

    def candidates(self) -> WorkerRanking:
        return self._ranking

    def add_inflight(self, worker: WorkerRef, request: RequestId, num_tokens: int) -> None:
        if num_tokens:
            self.inflight[worker, request] = num_tokens
        else:
            self.inflight.pop((worker, request), None)

    def add_inflight_job(self, worker: WorkerRef, job: Job) -> None:
        """Count nothing: the test sets the loads."""

    def measured(self, placement: Placement, pulled: KVReceived) -> None:
        """Learn nothing: all links are alike."""

    def remove(self, worker: WorkerRef) -> None:
        self.views.pop(worker, None)
        self._ranking.remove(worker)
        self._linked -= {pair for pair in self._linked if worker in pair}

    def add(self, view: WorkerView) -> None:
        """Add a worker, or replace what is known of it."""
        others = self.views.keys() - {view.ref}
        self._linked |= {pair for other in others for pair in ((other, view.ref), (view.ref, other))}
        self.views[view.ref] = view
        self._ranking.put(lambda: self.views[view.ref])

    def set_load(self, worker: WorkerRef, num_free_blocks: int) -> WorkerView:
        view = self.views[worker]
        self.add(replace(view, load=replace(view.load, num_free_blocks=num_free_blocks)))
        return self.views[worker]
