"""Rank given workers at once, for tests whose workers do not change, and read placements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

from tandem.routing.placement import NoPlacement, Placement
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import Pair, WorkerView


def ranking_of(
    views: Iterable[WorkerView], linked: Set[Pair] = frozenset(), unlinked: Set[Pair] = frozenset()
) -> WorkerRanking:
    ranking = WorkerRanking(linked, unlinked)
    for view in views:
        ranking.put(_getter(view))
    return ranking


def all_linked(*views: WorkerView) -> WorkerRanking:
    """Rank workers of which every possible pair is linked."""
    pairs = ((p, d) for p in views for d in views if p.prefills and d.decodes and p.ref != d.ref)
    return ranking_of(views, {(p.ref, d.ref) for p, d in pairs})


def chosen(outcome: Placement | NoPlacement) -> str:
    assert isinstance(outcome, Placement), outcome
    return f"{outcome.prefill.id} {outcome.decode.id}"


def _getter(view: WorkerView) -> Callable[[], WorkerView]:
    return lambda: view
