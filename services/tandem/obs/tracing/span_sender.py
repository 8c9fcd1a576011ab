"""Send spans in batches from a thread, so that no request waits for it.

This is a batching span processor in OpenTelemetry's terms. The SDK's own does not report how many spans it drops, and
logs each of them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from threading import Event, Thread
from typing import Any, NamedTuple, Protocol, TypeVar

from opentelemetry.sdk.trace.export import SpanExportResult

from tandem.obs.tracing.tracing import EndedSpan

Packed = TypeVar("Packed")
_log = logging.getLogger(__name__)


class Batching(NamedTuple):
    """Limits of `OTEL_BSP_*`: spans that may wait, spans per batch, and the longest wait for a batch."""

    max_waiting: int = 2048
    max_batch: int = 512
    delay_s: float = 5.0


class SpanExporter(Protocol[Packed]):
    """OpenTelemetry's SpanExporter, with spans that are packed for sending where they end.

    There the parts of a span are still in the CPU's caches; seconds later, on another thread, packing takes two to
    three times as long."""

    def pack(self, span: EndedSpan) -> Packed | None:
        """Return what `export` takes for this span; None where the span cannot be sent. Must not block."""
        ...

    def export(self, spans: Sequence[Packed]) -> SpanExportResult: ...

    def shutdown(self) -> None: ...


class SpanSender:
    """Own the waiting spans and the thread that sends them.

    When too many wait, a new span replaces the oldest. `num_dropped` counts replaced spans and spans that a receiver
    refused."""

    def __init__(self, exporters: Sequence[SpanExporter[Any]], batching: Batching) -> None:
        self._num_replaced = 0
        self._num_refused = 0
        self._exporters = exporters
        self._batching = batching
        # One list per span: what `pack` of each exporter returned.
        self._waiting: deque[list[Any]] = deque(maxlen=batching.max_waiting)
        self._batch_due = Event()
        self._is_stopping = False
        self._is_closed = False
        self._thread = Thread(target=self._run, name="telemetry-spans", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Return the dropped spans; each of the two counters is written by one thread only."""
        return self._num_replaced + self._num_refused

    def put(self, span: EndedSpan) -> None:
        """Enqueue a span; called by one thread at a time. Spans after `close` are not sent."""
        waiting, packed = self._waiting, [exporter.pack(span) for exporter in self._exporters]
        if len(waiting) == self._batching.max_waiting:
            self._num_replaced += 1
        waiting.append(packed)
        if len(waiting) >= self._batching.max_batch and not self._batch_due.is_set():
            self._batch_due.set()

    def close(self, timeout_s: float) -> None:
        """Send what waits, at most `timeout_s`; then the thread ends with the call that it is in."""
        self._is_stopping = True
        self._batch_due.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("telemetry: spans could not be sent in the %.1f s that stopping may take", timeout_s)
        if not self._is_closed:
            self._is_closed = True
            for exporter in self._exporters:
                exporter.shutdown()

    def _run(self) -> None:
        while not self._is_stopping:
            self._batch_due.wait(self._batching.delay_s)
            self._batch_due.clear()
            self._send_waiting()
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send the spans that wait now. Later ones wait for the next batch, because each call costs a millisecond."""
        num_left = len(self._waiting)
        while num_left > 0 and not self._is_closed:
            batch = [self._waiting.popleft() for _ in range(min(num_left, self._batching.max_batch))]
            num_left -= len(batch)
            for exporter, packed in zip(self._exporters, zip(*batch, strict=True), strict=True):
                self._send(exporter, [each for each in packed if each is not None])

    def _send(self, exporter: SpanExporter[Any], packed: Sequence[Any]) -> None:
        try:
            if not packed or (not self._is_closed and exporter.export(packed) is SpanExportResult.SUCCESS):
                return
        except Exception:
            _log.exception("telemetry: spans could not be sent")
        self._num_refused += len(packed)
