"""What the stream of one consumer holds for it."""

from __future__ import annotations

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.worker.kv.consumer_streams import ConsumerStream


def test_a_stream_that_fails_is_over_and_wakes_who_reads_it() -> None:
    stream = ConsumerStream(WorkerRef(WorkerId("consumer"), Incarnation(1), "h:1"))
    failure = ValueError("planted")
    stream.fail(failure)
    assert stream.failure is failure and stream.is_over and stream.wake.is_set()
