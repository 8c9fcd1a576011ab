"""What leaves one worker: its metrics, its endpoint, its spans; made first and closed last, and never asked by it."""

from __future__ import annotations

from tandem.core.clock import Clock
from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.engine.job_timings import JobTimes
from tandem.obs.metrics.metrics_server import MetricsEndpoint
from tandem.obs.telemetry import Telemetry
from tandem.worker.model.worker_info import WorkerInfo
from tandem.worker.telemetry.gauges import MetricSources, watch_worker
from tandem.worker.telemetry.job_metrics import JobMetrics
from tandem.worker.telemetry.job_spans import JobSpans
from tandem.worker.telemetry.step_metrics import StepMetrics


class WorkerTelemetry:
    """`steps` observes on the engine's thread, `job_ended` is called on the event loop, and collections come on threads
    of the endpoint and of whoever pushes."""

    def __init__(self, config: Config, identity: WorkerInfo, clock: Clock) -> None:
        """Raises TandemError for what OpenTelemetry's variables say wrongly."""
        self._identity = identity
        self._telemetry = Telemetry.start("tandem-worker", str(identity.me.id), config.telemetry.max_values)
        metrics = self._telemetry.metrics
        self.steps = StepMetrics(metrics)
        self._jobs = JobMetrics(metrics, identity.transport_kind)
        self._spans = JobSpans(self._telemetry.tracing, identity, clock)
        host, port = config.worker.host, config.worker.metrics_port
        self._endpoint = None if port < 0 else MetricsEndpoint(host, port, self._telemetry.exposition)

    def watch(self, sources: MetricSources) -> None:
        """The gauges; once, before `open`."""
        me = self._identity
        watch_worker(self._telemetry.metrics, sources, (str(me.me.id), me.pool, me.model, me.transport_kind))

    def open(self) -> str:
        """Answer to who asks for /metrics; returns at which host:port, empty if nowhere. Raises TandemError."""
        if self._endpoint is None:
            return ""
        try:
            self._endpoint.start()
        except OSError as error:
            raise TandemError(
                ErrorKind.INVALID_REQUEST, f"/metrics cannot be served: {error}", param="worker.metrics_port"
            ) from error
        # Where the worker itself is to be found, which need not be where it listens.
        host, port = self._identity.me.address.rpartition(":")[0], self._endpoint.address.rpartition(":")[2]
        return f"{host}:{port}"

    def job_ended(self, times: JobTimes) -> None:
        self._jobs.count(times)
        self._spans.tell(times)

    def close(self, timeout_s: float) -> None:
        """Send what there is. Blocks."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._telemetry.close(timeout_s)

    def __repr__(self) -> str:
        where = "nowhere" if self._endpoint is None else self._endpoint.address or "not yet"
        return f"<telemetry of {self._identity.me.id}, /metrics at {where}, {self.steps!r}>"
