"""Test when a worker that holds less than was predicted becomes suspect."""

from __future__ import annotations

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.routing.prefix_accuracy import SUSPECT_AFTER, Prediction, PrefixAccuracy, predict

A = WorkerRef(WorkerId("a"), Incarnation(1), "host:1")
B = WorkerRef(WorkerId("b"), Incarnation(1), "host:2")
LONG = Prediction(A, 64, 16)


def test_a_prediction_leaves_the_last_token_to_be_computed() -> None:
    assert predict(A, 4, 65, 16) == Prediction(A, 64, 16)
    assert predict(A, 4, 64, 16) == Prediction(A, 48, 16)
    assert predict(A, 1, 16, 16) == Prediction(A, 0, 16)


def test_only_repeated_short_hits_make_a_worker_suspect() -> None:
    hits = PrefixAccuracy()
    assert [hits.reported(LONG, 0) for _ in range(2 * SUSPECT_AFTER)] == [False, False, True] * 2
    assert (hits.num_predicted, hits.num_missed) == (64 * 6, 64 * 6)


def test_a_good_report_resets_the_count_and_a_trivial_one_does_not() -> None:
    hits = PrefixAccuracy()
    for num_cached in (0, 0, 64, 0, 0, 48, 0, 0):
        assert not hits.reported(LONG, num_cached), "48 is a block less, which says little"
    assert not hits.reported(Prediction(A, 0, 16), 0)
    assert hits.reported(LONG, 16)


def test_workers_are_suspected_individually_and_forgotten_when_gone() -> None:
    hits = PrefixAccuracy()
    assert not any(hits.reported(Prediction(worker, 64, 16), 0) for worker in (A, B, A, B))
    hits.forget(A)
    assert not hits.reported(LONG, 0) and hits.reported(Prediction(B, 64, 16), 0)


def test_more_than_was_predicted_is_no_miss() -> None:
    hits = PrefixAccuracy()
    assert not hits.reported(LONG, 128) and (hits.num_predicted, hits.num_missed) == (64, 0)


def test_a_short_remote_prefix_is_not_counted_against_the_worker_that_computes() -> None:
    own, remote = predict(A, 2, 100, 16), predict(B, 5, 100, 16, num_before=2)
    assert (own.num_tokens, remote.num_before, remote.num_tokens) == (32, 32, 48)
    hits = PrefixAccuracy()
    results = [(hits.reported(own, 32), hits.reported(remote, 32)) for _ in range(SUSPECT_AFTER)]
    assert results == [(False, False)] * (SUSPECT_AFTER - 1) + [(False, True)], "only the producer is suspect"
    assert (hits.num_predicted, hits.num_missed) == (80 * SUSPECT_AFTER, 48 * SUSPECT_AFTER)
    assert not hits.reported(remote, 80) and hits.num_missed == 48 * SUSPECT_AFTER
    assert predict(B, 9, 33, 16, num_before=9) == Prediction(B, 0, 16, 32), "no more than the prompt has"
