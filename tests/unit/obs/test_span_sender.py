"""Spans on their way out, where the receiver takes none."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from tandem.obs.tracing.span_sender import Batching, SpanSender
from tandem.obs.tracing.trace_context import TraceParent
from tandem.obs.tracing.tracing import EndedSpan, SpanRecord

OWN = TraceParent("1" * 32, "2" * 16, 3)
UNFIT = "unfit"
"""The name of a span that no exporter has a form for."""


def pack(span: EndedSpan) -> str | None:
    return None if span.record.name == UNFIT else span.record.name


class Stuck:
    """Until it is shut down."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.names: list[str] = []
        self.largest = 0
        self.num_shutdowns = 0
        self.is_called = threading.Event()
        self._is_over = threading.Event()

    pack = staticmethod(pack)

    def export(self, spans: Sequence[str]) -> SpanExportResult:
        self.num_calls += 1
        self.names += spans
        self.largest = max(self.largest, len(spans))
        self.is_called.set()
        assert self._is_over.wait(60.0)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        self._is_over.set()


class Taken:
    """Fails at its first call, in the worst way."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.num_shutdowns = 0

    pack = staticmethod(pack)

    def export(self, spans: Sequence[str]) -> SpanExportResult:
        self.batches.append([*spans])
        if len(self.batches) == 1:
            raise RuntimeError("not today")
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.num_shutdowns += 1


def put(sender: SpanSender, count: int) -> list[str]:
    names = [f"s{number}" for number in range(count)]
    for name in names:
        sender.put(EndedSpan(OWN, None, True, "", SpanRecord(name=name, start=1.0, end=2.0, attributes={})))
    return names


def test_a_call_that_hangs_is_ended_once_and_none_follows() -> None:
    before = set(threading.enumerate())
    stuck = Stuck()
    sender = SpanSender([stuck], Batching(max_batch=1))
    put(sender, 5)
    assert stuck.is_called.wait(30.0)
    sender.close(0.05)
    sender.close(0.05)
    assert (stuck.num_calls, stuck.num_shutdowns) == (1, 1)
    for thread in set(threading.enumerate()) - before:
        thread.join(30.0)
        assert not thread.is_alive(), thread
    assert (stuck.num_calls, stuck.num_shutdowns) == (1, 1)


def test_all_that_waits_goes_when_it_is_closed_in_order_whatever_fails(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Taken(), Taken()
    sender = SpanSender([first, second], Batching(max_batch=1000))
    names = put(sender, 7)
    sender.close(30.0)
    sender.close(30.0)
    assert first.batches == second.batches == [names] and sender.num_dropped == 2 * len(names)
    assert first.num_shutdowns == second.num_shutdowns == 1
    assert [record.message for record in caplog.records] == ["telemetry: spans could not be sent"] * 2


def test_what_was_taken_is_not_counted_as_dropped() -> None:
    taken = Taken()
    taken.batches.append([])
    sender = SpanSender([taken], Batching())
    put(sender, 3)
    sender.close(30.0)
    assert len(taken.batches[1]) == 3 and sender.num_dropped == 0


def test_all_that_waits_goes_in_batches_that_are_no_larger_than_they_may_be() -> None:
    stuck = Stuck()
    sender = SpanSender([stuck], Batching(max_batch=4))
    first = put(sender, 4)
    assert stuck.is_called.wait(30.0)
    others = put(sender, 30)
    stuck.shutdown()
    sender.close(30.0)
    assert stuck.names == first + others
    assert stuck.largest == 4


def test_what_has_waited_for_its_time_goes_alone() -> None:
    stuck = Stuck()
    sender = SpanSender([stuck], Batching(delay_s=0.01))
    put(sender, 1)
    assert stuck.is_called.wait(30.0)
    stuck.shutdown()
    sender.close(30.0)


def test_the_newest_are_kept_and_the_others_counted() -> None:
    stuck = Stuck()
    sender = SpanSender([stuck], Batching(max_waiting=3, max_batch=3))
    put(sender, 3)
    assert stuck.is_called.wait(30.0)
    put(sender, 8)
    assert sender.num_dropped == 5
    stuck.shutdown()
    sender.close(30.0)
    assert sender.num_dropped == 5 + len(stuck.names)
    assert stuck.names == ["s0", "s1", "s2", "s5", "s6", "s7"]


def test_a_span_that_cannot_be_sent_is_left_out_alone_and_no_call_is_empty() -> None:
    taken = Taken()
    taken.batches.append([])
    sender = SpanSender([taken], Batching(max_batch=1))
    for name in ("s0", UNFIT, "s1", UNFIT):
        sender.put(EndedSpan(OWN, None, True, "", SpanRecord(name=name, start=1.0, end=2.0, attributes={})))
    sender.close(30.0)
    assert taken.batches[1:] == [["s0"], ["s1"]] and sender.num_dropped == 0


def test_a_span_waits_as_it_is_packed_for_each_exporter() -> None:
    """Not as what it was made of, which is much more."""
    stuck, taken = Stuck(), Taken()
    taken.batches.append([])
    sender = SpanSender([stuck, taken], Batching(delay_s=600.0))
    put(sender, 2)
    assert [*sender._waiting] == [["s0", "s0"], ["s1", "s1"]]
    stuck.shutdown()
    sender.close(30.0)
    assert stuck.names == taken.batches[1] == ["s0", "s1"]
