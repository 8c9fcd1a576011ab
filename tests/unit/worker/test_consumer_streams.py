"""Test what the hand-off stream of one consumer holds."""

from __future__ import annotations

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.worker.kv.consumer_streams import ConsumerStream


def test_a_failed_stream_ends_and_wakes_its_reader() -> None:
    stream = ConsumerStream(WorkerRef(WorkerId("consumer"), Incarnation(1), "h:1"))
    failure = ValueError("planted")
    stream.fail(failure)
    assert stream.failure is failure and stream.is_over and stream.wake.is_set()
