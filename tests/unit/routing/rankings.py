"""Rank given workers at once, for tests whose workers do not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import Pair, WorkerView


def ranking_of(
    views: Iterable[WorkerView], linked: Set[Pair] = frozenset(), unlinked: Set[Pair] = frozenset()
) -> WorkerRanking:
    ranking = WorkerRanking(linked, unlinked)
    for view in views:
        ranking.put(_getter(view))
    return ranking


def _getter(view: WorkerView) -> Callable[[], WorkerView]:
    return lambda: view
