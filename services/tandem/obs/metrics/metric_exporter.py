"""Export metrics at intervals from a thread, so that no request waits for it.

This is a periodic exporting metric reader in OpenTelemetry's terms. A message that cannot be sent is dropped: the next
one has everything, because values are sums since the start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Event, Thread

from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.resources import Resource

from tandem.core.clock import wall_ns
from tandem.obs.metrics.metrics import Metrics
from tandem.obs.metrics.otlp_metrics import metrics_data

_log = logging.getLogger(__name__)


class MetricSender:
    """Collect `metrics` every `interval_s` seconds and send them through each of `exporters`, from a thread that starts
    immediately.

    `resource` describes this process to the receiver. To end it, call `stop`, then `join`.
    """

    def __init__(
        self, metrics: Metrics, resource: Resource, exporters: Sequence[MetricExporter], interval_s: float
    ) -> None:
        self._metrics = metrics
        self._resource = resource
        self._exporters = exporters
        self._interval_s = interval_s
        self._started_ns = wall_ns()
        self._is_stopping = Event()
        self._is_closed = False
        self._thread = Thread(target=self._run, name="telemetry-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Make the thread send the metrics once more and end; does not block. Call `join` afterwards."""
        self._is_stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait until the last metrics were sent, at most `timeout_s` seconds, and then shut the exporters down. Logs a
        warning where the time was too short."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("the last metrics could not be sent within the %.1f s that a stop may take", timeout_s)
        if not self._is_closed:
            self._is_closed = True
            for exporter in self._exporters:
                exporter.shutdown()

    def _run(self) -> None:
        while not self._is_stopping.wait(self._interval_s):
            self._send()
        self._send()

    def _send(self) -> None:
        try:
            data = metrics_data(self._resource, self._metrics.collect(), self._started_ns, wall_ns())
            for exporter in self._exporters:
                if not self._is_closed:
                    exporter.export(data)
        except Exception:
            _log.warning("metrics could not be sent; the next attempt sends their values again", exc_info=True)
