"""Test what a model is found to lack, by the live workers, their links and the gateway's mode."""

from __future__ import annotations

import pytest

from tandem.core.config import Disaggregation, Pool
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.link import LinkReport
from tandem.core.worker_load import WorkerLoad
from tandem.routing.pd_pairs import PairRegistry
from tandem.routing.shortages import find_shortages
from tandem.routing.worker_view import WorkerView

POOL_OF: dict[str, Pool] = {"p": "prefill", "d": "decode", "m": "mixed"}


def view(name: str, *, model: str = "a", draining: bool = False) -> WorkerView:
    ref = WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1")
    return WorkerView(ref, POOL_OF[name[0]], model, "f", WorkerLoad(draining=draining))


def linked(mode: Disaggregation, views: list[WorkerView], *, moved: bool = True) -> PairRegistry:
    pairs = PairRegistry(mode)
    for pair, _ in pairs.due(views, 0.0):
        pairs.ended(pair, moved=moved, retry_at=5.0)
    return pairs


@pytest.mark.parametrize(
    ("mode", "workers", "lacks", "is_served"),
    [
        ("prefer", "p d", None, True),
        ("prefer", "d", "prefill", True),
        ("prefer", "p", "decode", True),
        ("prefer", "m", None, True),
        ("prefer", "m d", "prefill", True),
        ("prefer", "p m", None, True),
        ("prefer", "", "worker", False),
        ("auto", "d", "prefill", True),
        ("off", "d", None, True),
        ("off", "", "worker", False),
        ("strict", "d", "prefill", False),
        ("strict", "p", "decode", False),
        ("strict", "m", "link", False),
        ("strict", "m m2", None, False),
    ],
)
def test_what_is_lacking(mode: Disaggregation, workers: str, lacks: str | None, is_served: bool) -> None:
    views = [view(name) for name in workers.split()]
    found = find_shortages(["a"], views, linked(mode, views), mode)
    assert [(shortage.lacks, shortage.is_served) for shortage in found] == (
        [] if lacks is None else [(lacks, is_served)]
    )


def test_a_pair_that_moved_no_block_lacks_a_link_and_a_refused_link_has_its_reason() -> None:
    views = [view("p"), view("d")]
    pairs = linked("prefer", views, moved=False)
    (shortage,) = find_shortages(["a"], views, pairs, "prefer")
    assert (shortage.lacks, shortage.is_served) == ("link", True) and "no block has moved" in shortage.reason
    pairs.on_link_report(
        views[1].ref, LinkReport(source=views[0].ref, link_type="tcp", evidence="", problem="too slow", refused=True)
    )
    (shortage,) = find_shortages(["a"], views, pairs, "prefer")
    assert shortage.lacks == "link" and "too slow" in shortage.reason


def test_workers_that_drain_do_not_count() -> None:
    views = [view("p"), view("d")]
    pairs = linked("prefer", views)
    draining = [view("p", draining=True), view("d")]
    assert [shortage.lacks for shortage in find_shortages(["a"], draining, pairs, "prefer")] == ["prefill"]


def test_each_model_is_judged_by_its_own_workers() -> None:
    views = [view("p"), view("d"), view("p2", model="b")]
    pairs = linked("prefer", views)
    found = find_shortages(["a", "b", "c"], views, pairs, "prefer")
    assert [(shortage.model, shortage.lacks) for shortage in found] == [("b", "decode"), ("c", "worker")]
