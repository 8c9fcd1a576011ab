"""Own OpenTelemetry's tracer and its batch processors, which send spans from threads, so that no request waits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Thread

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

_log = logging.getLogger(__name__)


class SpanPipeline:
    """Create trace spans (`tracer`) and send the ended ones through each of `exporters`, from threads.

    `resource` describes this process to the receiver. At most `max_waiting` ended spans wait for each exporter; a
    further one replaces the oldest. The SDK itself reads the variables for sampling, the size of a span and batches."""

    def __init__(self, exporters: Sequence[SpanExporter], resource: Resource, max_waiting: int) -> None:
        self._exporters = exporters
        self._processors = [CountingProcessor(exporter, max_waiting) for exporter in exporters]
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        for processor in self._processors:
            self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("tandem")

    @property
    def num_dropped(self) -> int:
        """Return how many spans were lost since the start: replaced by newer ones while they waited, or not sent
        because the export failed."""
        return sum(processor.num_dropped for processor in self._processors)

    def close(self, timeout_s: float) -> None:
        """Send the waiting spans, and return when that is done, or after `timeout_s` seconds with a warning in the log.
        Blocks; may be called again."""
        closing = Thread(target=self._provider.shutdown, name="telemetry-spans", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            _log.warning("the last spans could not be sent within the %.1f s that a stop may take", timeout_s)
            for exporter in self._exporters:
                exporter.shutdown()


class CountingProcessor(BatchSpanProcessor):
    """Queue ended spans for one exporter as the SDK's batch processor does, and count the spans that are dropped, which
    the SDK does not report.

    When `max_waiting` spans wait, a new one replaces the oldest. Only one thread at a time may end spans."""

    def __init__(self, exporter: SpanExporter, max_waiting: int) -> None:
        self._counted = _CountingExporter(exporter)
        self._max_waiting = max_waiting
        self._num_ended = 0
        self._num_replaced = 0
        super().__init__(self._counted, max_queue_size=max_waiting)

    @property
    def num_dropped(self) -> int:
        """Return how many spans were replaced by newer ones or not sent because the export failed.

        While the SDK's thread takes a batch out of a full queue, a span that ends is counted as replaced although there
        is room for it: the SDK does not report what it has taken before it calls the exporter."""
        return self._num_replaced + self._counted.num_refused

    def on_end(self, span: ReadableSpan) -> None:
        num_waiting = self._num_ended - self._num_replaced - self._counted.num_taken
        self._num_replaced += num_waiting >= self._max_waiting
        self._num_ended += 1
        super().on_end(span)


class _CountingExporter(SpanExporter):
    """Export through another exporter; `num_taken` counts its spans, `num_refused` those that were not sent."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.num_taken = 0
        self.num_refused = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self.num_refused += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
