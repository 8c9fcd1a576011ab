"""What leaves a process, with a real receiver at the other end; OTEL_ variables say where it goes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Literal

import pytest

from tandem.obs.telemetry import Telemetry
from tandem.obs.tracing import SpanEvent, SpanRecord
from tests.otlp import OtlpReceiver, attributes, otlp_receiver

BOTH = pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def every_thread_ends() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(30.0)
        assert not thread.is_alive(), thread


def send_to(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", receiver.protocol)


def started() -> Telemetry:
    return Telemetry.start("tandem-gateway", "gateway-1", 10)


def a_request(telemetry: Telemetry) -> str:
    """Its trace's id."""
    trace = telemetry.tracing.begin("", "", 100.0)
    queue = SpanRecord(name="queue", start=100.0, end=101.0, attributes={"tandem.lane": "batch"})
    at_once = SpanEvent("chunk", 100.5, {"tokens": 3})
    trace.end(
        SpanRecord(
            name="chat m", start=100.0, end=102.0, attributes={}, children=(queue,), events=(at_once,), error="x"
        )
    )
    return trace.id


@BOTH
def test_spans_arrive(protocol: Literal["grpc", "http/protobuf"], monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_receiver(protocol) as receiver:
        send_to(receiver, monkeypatch)
        telemetry = started()
        trace_id = a_request(telemetry)
        telemetry.close(30.0)
        chat, queue = receiver.span("chat m"), receiver.span("queue")
        assert chat.trace_id.hex() == queue.trace_id.hex() == trace_id
        assert queue.parent_span_id == chat.span_id
        assert attributes(queue.attributes) == {"tandem.lane": "batch"}
        assert attributes(chat.events[0].attributes) == {"tokens": 3}
        resource, _ = receiver.spans[0]
        assert (resource["service.name"], resource["service.instance.id"]) == ("tandem-gateway", "gateway-1")
