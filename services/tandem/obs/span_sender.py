"""Sends spans in batches, by threads of the SDK's; never makes one, and never keeps a request waiting."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Thread

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

_log = logging.getLogger(__name__)


class SpanSender:
    """`OTEL_BSP_*` say how many spans wait at most (what comes then replaces the oldest), and for how long."""

    def __init__(self, resource: Resource, exporters: Sequence[SpanExporter]) -> None:
        self._exporters = [_ClosedOnce(each) for each in exporters]
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        for exporter in self._exporters:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer: Tracer = self._provider.get_tracer("tandem")

    def close(self, timeout_s: float) -> None:
        """Sends what waits. A receiver that has not taken it by then is left alone: its thread ends with the call that
        it is in."""
        flush = Thread(target=self._provider.shutdown, name="telemetry-spans-close", daemon=True)
        flush.start()
        flush.join(timeout_s)
        if flush.is_alive():
            _log.warning("telemetry: spans could not be sent in the %.1f s that stopping may take", timeout_s)
        for exporter in self._exporters:
            exporter.shutdown()


class _ClosedOnce(SpanExporter):
    """The SDK closes an exporter only after its last batch, however long that takes; here it may be closed before."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._is_closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE if self._is_closed else self._exporter.export(spans)

    def shutdown(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
