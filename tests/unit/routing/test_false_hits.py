"""When a worker that holds less than was predicted is doubted."""

from __future__ import annotations

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.routing.false_hits import DOUBT_AFTER, FalseHits, Prediction, predict

A = WorkerRef(WorkerId("a"), Incarnation(1), "host:1")
B = WorkerRef(WorkerId("b"), Incarnation(1), "host:2")
LONG = Prediction(A, 64, 16)


def test_a_prediction_leaves_the_last_token_to_be_computed() -> None:
    assert predict(A, 4, 65, 16) == Prediction(A, 64, 16)
    assert predict(A, 4, 64, 16) == Prediction(A, 48, 16)
    assert predict(A, 1, 16, 16) == Prediction(A, 0, 16)


def test_only_what_falls_short_again_and_again_is_doubted() -> None:
    hits = FalseHits()
    assert [hits.reported(LONG, 0) for _ in range(2 * DOUBT_AFTER)] == [False, False, True] * 2
    assert (hits.num_predicted, hits.num_missed) == (64 * 6, 64 * 6)


def test_a_good_report_forgives_and_a_trivial_one_does_not() -> None:
    hits = FalseHits()
    for num_cached in (0, 0, 64, 0, 0, 48, 0, 0):
        assert not hits.reported(LONG, num_cached), "48 is a block less, which says little"
    assert not hits.reported(Prediction(A, 0, 16), 0)
    assert hits.reported(LONG, 16)


def test_workers_are_doubted_one_by_one_and_forgotten_when_they_go() -> None:
    hits = FalseHits()
    assert not any(hits.reported(Prediction(worker, 64, 16), 0) for worker in (A, B, A, B))
    hits.forget(A)
    assert not hits.reported(LONG, 0) and hits.reported(Prediction(B, 64, 16), 0)


def test_more_than_was_predicted_is_no_miss() -> None:
    hits = FalseHits()
    assert not hits.reported(LONG, 128) and (hits.num_predicted, hits.num_missed) == (64, 0)
