"""Serve health probes, this gateway's metrics, and the addresses of its workers' metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec import UNSET
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.interfaces import Authenticator, RequestDispatcher
from tandem.gateway.http.exchange import Exchange, json_response
from tandem.gateway.http.openai_schema import HealthReply, ScrapeGroup, ScrapeLabels
from tandem.gateway.http.routes import Operation
from tandem.gateway.tenants.authenticator import api_keys
from tandem.obs.metrics.metrics_server import Exposition

PROBES = frozenset({b"/health", b"/live", b"/ready"})
"""Paths of health probes, which are answered also on connections beyond `HttpLimits.max_connections`."""
_ALIVE = "Liveness: 200 while this process answers"
_READY = "Readiness: 200 when requests can be served"
METRICS, TARGETS, ENDPOINT_PICKER = "/metrics", "/metrics/targets", "/metrics/endpoint-picker"
METRICS_PATHS = (METRICS, TARGETS, ENDPOINT_PICKER)
_PICKER = "Load of this gateway under vLLM's names, for the endpoint picker of an InferencePool"
_TEXT = CONTENT_TYPE_PLAIN_0_0_4.partition(";")[0]
_TARGETS = "Addresses of the workers' own metrics, for Prometheus' HTTP service discovery"
_REFUSALS = (ErrorKind.UNAUTHENTICATED, ErrorKind.FORBIDDEN)


class HealthRoutes:
    """Handle `/health` and `/live` (liveness: restart the process when they fail) and `/ready` (readiness: send traffic
    while it succeeds).

    `problems`: functions that each return a sentence for the `warning` of `/ready`, or None where nothing is wrong."""

    def __init__(self, dispatch: RequestDispatcher, problems: Sequence[Callable[[], str | None]]) -> None:
        self._dispatch = dispatch
        self._problems = problems

    @Operation("GET", "/live", _ALIVE, reply=HealthReply)
    @Operation("GET", "/health", _ALIVE, reply=HealthReply)
    async def health(self, exchange: Exchange) -> Response:
        """Send 200 with the status ok, whether or not requests can be served."""
        return json_response(HealthReply("ok"))

    @Operation("GET", "/ready", _READY, reply=HealthReply, not_ready=HealthReply)
    async def ready(self, exchange: Exchange) -> Response:
        """Send 200 if requests can be served, else 503 with what is missing.

        A problem in spite of which requests are served, such as a tenants file that does not parse, is sent as the
        `warning` of a response with status 200.
        """
        missing = self._dispatch.ready()
        if missing is not None:
            return json_response(HealthReply("not_ready", missing), 503, {"retry-after": "1"})
        problems = [problem for find in self._problems if (problem := find())]
        return json_response(HealthReply("ready", warning="; ".join(problems) or UNSET))


class MetricsRoutes:
    """Handle `/metrics` and `/metrics/targets` (for Prometheus) and `/metrics/endpoint-picker`.

    They answer operators only, because the metrics name all tenants and the targets are addresses of workers; where no
    keys are required every client is an operator. `exposition`, `picker_exposition`: functions that return the content
    type and the body of `/metrics` and of `/metrics/endpoint-picker` for the value of an Accept header."""

    def __init__(
        self,
        dispatch: RequestDispatcher,
        exposition: Exposition,
        picker_exposition: Exposition,
        authenticator: Authenticator,
    ) -> None:
        self._dispatch = dispatch
        self._exposition = exposition
        self._picker_exposition = picker_exposition
        self._authenticator = authenticator

    @Operation("GET", METRICS, "Metrics for Prometheus", text=_TEXT, errors=_REFUSALS)
    async def metrics(self, exchange: Exchange) -> Response:
        """Send this process's metrics. They are formatted in a thread, because formatting thousands of series on the
        event loop would delay the token streams."""
        self._require_operator(exchange)
        accept = exchange.fields.get("accept", "")
        content_type, body = await asyncio.to_thread(self._exposition, accept)
        return Response(body, headers={"content-type": content_type})

    @Operation("GET", ENDPOINT_PICKER, _PICKER, text=_TEXT, errors=_REFUSALS)
    async def endpoint_picker(self, exchange: Exchange) -> Response:
        """Send the metrics of `telemetry.endpoint_metrics`. They are formatted on the event loop: with only a few
        series that takes less time than the use of a thread, and an endpoint picker may request them several times a
        second."""
        self._require_operator(exchange)
        content_type, body = self._picker_exposition(exchange.fields.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    @Operation("GET", TARGETS, _TARGETS, reply=list[ScrapeGroup], errors=_REFUSALS)
    async def targets(self, exchange: Exchange) -> Response:
        """Send the addresses of the live workers' own metrics, in the format of Prometheus' HTTP service discovery
        (https://prometheus.io/docs/prometheus/latest/http_sd/)."""
        self._require_operator(exchange)
        found = [
            ScrapeGroup([address], ScrapeLabels(worker.pool, worker.ref.id, worker.model))
            for address, worker in self._dispatch.scrape_targets()
        ]
        return json_response(found)

    def _require_operator(self, exchange: Exchange) -> None:
        """Raise UNAUTHENTICATED where the caller has no valid API key, and FORBIDDEN where the key's tenant is no
        operator."""
        if not self._authenticator.identify(api_keys(exchange.header_items)).operator:
            message = f"{exchange.scope['path']} needs the key of an operator: the tenants file says who is one"
            raise TandemError(ErrorKind.FORBIDDEN, message)
