"""Spans on their way out, where the receiver takes none."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tandem.obs.span_sender import SpanSender


class Stuck(SpanExporter):
    """Until it is shut down."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_shutdowns = 0
        self.is_called = threading.Event()
        self._is_over = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_calls += 1
        self.is_called.set()
        assert self._is_over.wait(60.0)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        self._is_over.set()


def test_a_call_that_hangs_is_ended_once_and_none_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    before = set(threading.enumerate())
    stuck = Stuck()
    sender = SpanSender(Resource({}), [stuck])
    for _ in range(5):
        sender.tracer.start_span("x").end()
    assert stuck.is_called.wait(30.0)
    sender.close(0.05)
    assert (stuck.num_calls, stuck.num_shutdowns) == (1, 1)
    for thread in set(threading.enumerate()) - before:
        thread.join(30.0)
        assert not thread.is_alive(), thread
    assert (stuck.num_calls, stuck.num_shutdowns) == (1, 1)
