"""Serve the health, readiness and metrics endpoints of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec import UNSET
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from tandem.gateway.context.interfaces import RequestDispatcher
from tandem.gateway.http.exchange import Exchange, json_response
from tandem.gateway.http.openai_schema import HealthReply, ScrapeGroup, ScrapeLabels
from tandem.gateway.http.routes import Operation
from tandem.obs.metrics.metrics_server import Exposition
from tandem.obs.telemetry import Telemetry

PROBES = frozenset({b"/health", b"/live", b"/ready"})
"""Paths of health probes, which are answered also on connections beyond `HttpLimits.max_connections`."""
_ALIVE = "Liveness: 200 while this process answers"
_READY = "Readiness: 200 when requests can be served"
_PICKER = "Load of this gateway under vLLM's names, for the endpoint picker of an InferencePool"
_TEXT = CONTENT_TYPE_PLAIN_0_0_4.partition(";")[0]
_TARGETS = "Addresses of the workers' own metrics, for Prometheus' HTTP service discovery"


class HealthRoutes:
    """Handlers of `/health` and `/live` (liveness: restart the process when they fail), `/ready` (readiness: send
    traffic while it succeeds), `/metrics` and `/metrics/targets` (for Prometheus) and `/metrics/endpoint-picker`.

    `problems`: each returns a sentence for the `warning` of `/ready`, or None. `endpoint_exposition` returns the
    content of `/metrics/endpoint-picker` for the value of an Accept header."""

    def __init__(
        self,
        dispatch: RequestDispatcher,
        telemetry: Telemetry,
        problems: Sequence[Callable[[], str | None]],
        endpoint_exposition: Exposition,
    ) -> None:
        self._dispatch = dispatch
        self._telemetry = telemetry
        self._problems = problems
        self._endpoint_exposition = endpoint_exposition

    @Operation("GET", "/live", _ALIVE, reply=HealthReply)
    @Operation("GET", "/health", _ALIVE, reply=HealthReply)
    async def health(self, exchange: Exchange) -> Response:
        """Send 200 with the status ok, whether or not requests can be served."""
        return json_response(HealthReply("ok"))

    @Operation("GET", "/ready", _READY, reply=HealthReply, not_ready=HealthReply)
    async def ready(self, exchange: Exchange) -> Response:
        """Send 200 if requests can be served, else 503 with what is missing.

        A problem in spite of which requests are served, such as a tenants file that does not parse, is the `warning` of
        a 200.
        """
        missing = self._dispatch.ready()
        if missing is not None:
            return json_response(HealthReply("not_ready", missing), 503, {"retry-after": "1"})
        problems = [problem for find in self._problems if (problem := find())]
        return json_response(HealthReply("ready", warning="; ".join(problems) or UNSET))

    @Operation("GET", "/metrics", "Metrics for Prometheus", text=_TEXT)
    async def metrics(self, exchange: Exchange) -> Response:
        """Send this process's metrics. A thread formats them, because formatting thousands of series would delay the
        streams."""
        accept = exchange.fields.get("accept", "")
        content_type, body = await asyncio.to_thread(self._telemetry.exposition, accept)
        return Response(body, headers={"content-type": content_type})

    @Operation("GET", "/metrics/endpoint-picker", _PICKER, text=_TEXT)
    async def endpoint_picker(self, exchange: Exchange) -> Response:
        """Send the metrics of `telemetry.endpoint_metrics`. Few series are formatted in less time than a thread
        takes, and an endpoint picker may ask several times a second."""
        content_type, body = self._endpoint_exposition(exchange.fields.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    @Operation("GET", "/metrics/targets", _TARGETS, reply=list[ScrapeGroup])
    async def targets(self, exchange: Exchange) -> Response:
        """Send the addresses of the live workers' own metrics, in the format of Prometheus' HTTP service discovery
        (https://prometheus.io/docs/prometheus/latest/http_sd/)."""
        found = [
            ScrapeGroup([target.address], ScrapeLabels(target.pool, target.worker, target.model))
            for target in self._dispatch.scrape_targets()
        ]
        return json_response(found)
