"""Compose the gateway's ASGI application: its routes, error handling and lifespan."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from tandem.core.clock import Clock, SystemClock
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.thread_priority import lower_priority
from tandem.gateway.context.interfaces import AllowAll, Authenticator, RequestDispatcher
from tandem.gateway.gauges import watch_answers, watch_grammars
from tandem.gateway.http.monitoring_routes import METRICS_PATHS, HealthRoutes, MetricsRoutes
from tandem.gateway.http.openai_routes import OpenAIRoutes
from tandem.gateway.http.openapi import OpenApiDocs
from tandem.gateway.http.routes import HandlerRoute, RoutedApp, routes_of
from tandem.gateway.openai.output_spec import OutputSpecFactory
from tandem.gateway.serving.completions import NUM_ENCODERS, CompletionService
from tandem.gateway.telemetry.endpoint_metrics import endpoint_metrics
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.gateway.telemetry.request_record import RequestObserver
from tandem.gateway.telemetry.request_recorder import RequestRecorder
from tandem.obs.metrics.metrics import Metrics
from tandem.obs.metrics.prometheus import PrometheusCollector
from tandem.obs.telemetry import Telemetry
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets

_UNSERVED: Mapping[str, Sequence[str]] = {
    "embeddings": ["/v1/embeddings"],
    "the Responses API": ["/v1/responses", "/v1/conversations"],
    "the Batch API (the lane `batch` of a completion is for work that can wait)": ["/v1/batches"],
    "files": ["/v1/files", "/v1/uploads"],
    "vector stores": ["/v1/vector_stores"],
    "fine-tuning": ["/v1/fine_tuning"],
    "audio": ["/v1/audio"],
    "realtime sessions": ["/v1/realtime"],
    "images": ["/v1/images"],
    "videos": ["/v1/videos"],
    "moderations": ["/v1/moderations"],
    "assistants": ["/v1/assistants", "/v1/threads"],
    "evaluations": ["/v1/evals"],
    "containers": ["/v1/containers"],
    "Anthropic's Messages API": ["/v1/messages"],
    "LoRA adapters": ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"],
    "reranking": ["/v1/rerank", "/rerank"],
    "scoring of pairs": ["/v1/score", "/score"],
    "pooling": ["/pooling"],
    "classification": ["/classify"],
}
"""URL paths of features of other servers, by the feature's name in the error; each path covers all paths below it."""


class GatewayApp(RoutedApp):
    """Serve the gateway's HTTP API as an ASGI 3 application, under any ASGI server or middleware.

    `answers`: the CompletionService that runs completions, which the gRPC server uses too. `metrics`: a second ASGI
    application for the listener of `gateway.metrics_port`. It serves the metrics routes and the health probes, and
    requires no API key. Where that port is set, this application has no metrics routes.
    """

    def __init__(
        self,
        dispatch: RequestDispatcher,
        authenticator: Authenticator,
        config: GatewayConfig,
        *,
        telemetry: Telemetry | None = None,
        observers: Sequence[RequestObserver] = (),
        targets: LatencyTargets = NO_TARGETS,
        clock: Clock | None = None,
    ) -> None:
        """Build the application, which sends requests to `dispatch`.

        `telemetry`: receives metrics and traces; None: metrics are exported only at `/metrics`, and there are no
        traces. `observers`: receive the record of every request that has ended. `targets`: latency targets by lane.
        Metrics count the requests that miss them, and each record counts the request's gaps between tokens that are
        longer than the target. `clock`: the clock that `dispatch` uses; None: the system's clock.
        """
        telemetry = telemetry or Telemetry(Metrics())
        # Without lower priority one tenant's attack made other tenants' p99 1.6 times as long, with it 1.4 times
        # (`loadtest neighbour`, two cores).
        self._encoders = ThreadPoolExecutor(NUM_ENCODERS, "tokenize", lower_priority)
        self._measures = RequestMetrics(telemetry.metrics, targets)
        output_specs = OutputSpecFactory(config.tool_parser, config.reasoning_parser)
        recorder = RequestRecorder(clock or SystemClock(), self._measures, telemetry.tracer, observers, targets)
        self.answers = CompletionService(dispatch, self._encoders, recorder, output_specs)
        watch_answers(telemetry.metrics, recorder)
        watch_grammars(telemetry.metrics, lambda: self.answers.grammars.num_waiting)
        openai = OpenAIRoutes(self.answers, authenticator, config.max_body, config.heartbeat_s)
        picker = PrometheusCollector(endpoint_metrics(dispatch, recorder))
        self._problems = [authenticator.problem, dispatch.problem]
        metrics = partial(MetricsRoutes, dispatch, telemetry.exposition, picker.exposition)
        health = [*routes_of(HealthRoutes(dispatch, self._problems))]
        routes = [*routes_of(openai), *health]
        if config.metrics_port < 0:
            routes += routes_of(metrics(authenticator))
        routes += routes_of(OpenApiDocs(routes))
        super().__init__(
            Router(routes, redirect_slashes=False, default=_refuse_path, lifespan=self._lifespan), self._measures
        )
        unkeyed = [*health, *routes_of(metrics(AllowAll()))]
        self.metrics = RoutedApp(Router(unkeyed, redirect_slashes=False, default=_refuse_on_metrics), self._measures)

    def serve(self, routes: Iterable[HandlerRoute]) -> None:
        """Add routes. A path that an earlier route matches stays with that route."""
        self._router.routes.extend(routes)

    def count_refusal(self, error: TandemError) -> None:
        """Count a response by which the HTTP server refused a request before it reached this application."""
        self._measures.responded(error.kind.http)
        if error.reason == "connections":
            self._measures.crowded()

    def warn_of(self, problem: Callable[[], str | None]) -> None:
        """Add `problem` to the functions whose results make up the `warning` of `/ready`. It returns a sentence, or
        None if nothing is wrong."""
        self._problems.append(problem)

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncGenerator[None, None]:
        yield
        self._encoders.shutdown(wait=False, cancel_futures=True)
        await self.answers.grammars.stop()


async def _refuse_path(scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    for feature, prefixes in _UNSERVED.items():
        if any(path == prefix or path.startswith(prefix + "/") for prefix in prefixes):
            raise TandemError(ErrorKind.NOT_FOUND, f"{path}: Tandem does not serve {feature}")
    if path in METRICS_PATHS:
        message = f"{path} is not at this port: this gateway serves metrics at gateway.metrics_port"
        raise TandemError(ErrorKind.NOT_FOUND, message)
    raise TandemError(ErrorKind.NOT_FOUND, f"unknown path {path}; /docs lists all paths")


async def _refuse_on_metrics(scope: Scope, receive: Receive, send: Send) -> None:
    message = f"unknown path {scope['path']}; this port serves {', '.join(METRICS_PATHS)} and the probes"
    raise TandemError(ErrorKind.NOT_FOUND, message)
