"""Export the metrics and trace spans of one worker."""

from __future__ import annotations

from tandem.core.clock import Clock
from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.engine.job_timeline import JobTimes
from tandem.obs.metrics.metrics_server import MetricsEndpoint
from tandem.obs.telemetry import Telemetry
from tandem.worker.model.worker_info import WorkerInfo
from tandem.worker.telemetry.counters import JobMetrics, StepMetrics
from tandem.worker.telemetry.gauges import MetricSources, watch_worker
from tandem.worker.telemetry.job_spans import JobSpans


class WorkerTelemetry:
    """Own the metrics, trace spans and /metrics endpoint of one worker.

    `steps` is the observer of the engine's steps, which is called on the engine's thread. `job_ended` is called on the
    event loop. Metrics are collected on threads of the endpoint and of the exporters.
    """

    def __init__(self, config: Config, identity: WorkerInfo, clock: Clock) -> None:
        """Set up metrics and tracing; the endpoint starts with `open`. Raises TandemError for invalid OpenTelemetry
        environment variables."""
        self._identity = identity
        self._telemetry = Telemetry.start("tandem-worker", str(identity.me.id), config.telemetry.max_values)
        metrics = self._telemetry.metrics
        self.steps = StepMetrics(metrics)
        self._jobs = JobMetrics(metrics, identity.transport_kind)
        self._spans = JobSpans(self._telemetry.tracer, identity, clock)
        host, port = config.worker.host, config.worker.metrics_port
        self._endpoint = None if port < 0 else MetricsEndpoint(host, port, self._telemetry.exposition)

    def watch(self, sources: MetricSources) -> None:
        """Register the worker's gauges, which read from `sources`; called once, before `open`."""
        me = self._identity
        info = (str(me.me.id), me.pool, me.model, me.transport_kind)
        watch_worker(self._telemetry.metrics, sources, info, me.transport.layout.block_size)

    def open(self) -> str:
        """Start the /metrics endpoint and return its host:port, or "" where none is configured. Raises TandemError when
        it cannot listen."""
        if self._endpoint is None:
            return ""
        try:
            self._endpoint.start()
        except OSError as error:
            raise TandemError(
                ErrorKind.INVALID_REQUEST,
                f"worker.metrics_port: cannot serve /metrics: {error}; set another port, or 0",
                param="worker.metrics_port",
            ) from error
        # Use the advertised host, which may differ from the one that the endpoint listens on.
        host, port = self._identity.me.address.rpartition(":")[0], self._endpoint.address.rpartition(":")[2]
        return f"{host}:{port}"

    def job_ended(self, times: JobTimes) -> None:
        self._jobs.count(times)
        self._spans.record(times)

    def close(self, timeout_s: float) -> None:
        """Export the metrics and spans that are not exported yet, and end the endpoint and the exporters. Blocks for at
        most `timeout_s` seconds in the exporters."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._telemetry.close(timeout_s)

    def __repr__(self) -> str:
        address = "nowhere" if self._endpoint is None else self._endpoint.address or "not yet"
        return f"<telemetry of {self._identity.me.id}, /metrics at {address}, {self.steps!r}>"
