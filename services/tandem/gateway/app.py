"""Compose the gateway's ASGI application: its routes, error handling and lifespan."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from tandem.core.clock import Clock, SystemClock
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.interfaces import Authenticator, RequestDispatcher
from tandem.gateway.http.exchange import Exchange, error_response
from tandem.gateway.http.health import HealthRoutes
from tandem.gateway.http.openai_routes import OpenAIRoutes
from tandem.gateway.http.openapi import OpenApiDocs
from tandem.gateway.http.routes import HandlerRoute, routes_of
from tandem.gateway.openai.output_spec import OutputSpecFactory
from tandem.gateway.serving.completions import NUM_ENCODERS, CompletionService
from tandem.gateway.telemetry.endpoint_metrics import endpoint_metrics
from tandem.gateway.telemetry.gauges import watch_answers, watch_dispatch, watch_grammars
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.gateway.telemetry.request_record import RequestObserver
from tandem.gateway.telemetry.request_recorder import RequestRecorder
from tandem.obs.logs.log_context import InRequest
from tandem.obs.metrics.metrics import Metrics
from tandem.obs.metrics.prometheus import PrometheusCollector
from tandem.obs.telemetry import Telemetry
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets

_log = logging.getLogger(__name__)
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
"""Paths of other servers' features, with what is below them."""


class GatewayApp:
    """ASGI 3 application of the gateway: it routes requests to their handlers and turns every error into a response.

    Runs under any ASGI server or middleware. `answers`: its CompletionService, which the gRPC server uses too.
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
        """Build the application; it sends requests to `dispatch`.

        `observers`: receive the record of every request that has ended. `clock`: that of the dispatcher; None: the
        system's. `telemetry`: None: metrics that only `/metrics` exports, and no traces. `targets`: latency targets by
        lane; metrics and records count what misses them.
        """
        telemetry = telemetry or Telemetry(Metrics())
        self._encoders = ThreadPoolExecutor(NUM_ENCODERS, thread_name_prefix="tokenize")
        self._measures = RequestMetrics(telemetry.metrics, targets)
        output_specs = OutputSpecFactory(config.tool_parser, config.reasoning_parser)
        recorder = RequestRecorder(clock or SystemClock(), self._measures, telemetry.tracer, observers, targets)
        self.answers = CompletionService(dispatch, self._encoders, recorder, output_specs)
        watch_answers(telemetry.metrics, recorder)
        watch_dispatch(telemetry.metrics, dispatch)
        watch_grammars(telemetry.metrics, lambda: self.answers.grammars.num_waiting)
        openai = OpenAIRoutes(self.answers, authenticator, config.max_body, config.heartbeat_s)
        picker = PrometheusCollector(endpoint_metrics(dispatch, recorder))
        self._problems = [authenticator.problem, dispatch.problem]
        health = HealthRoutes(dispatch, telemetry, self._problems, picker.exposition)
        routes = [*routes_of(openai), *routes_of(health)]
        routes += routes_of(OpenApiDocs(routes))
        self._router = Router(routes, redirect_slashes=False, default=_refuse_path, lifespan=self._lifespan)

    def serve(self, routes: Iterable[HandlerRoute]) -> None:
        """Add routes. A path that an earlier route matches stays with that route."""
        self._router.routes.extend(routes)

    def warn_of(self, problem: Callable[[], str | None]) -> None:
        """Add a source of the `warning` of `/ready`: a function that returns a sentence, or None if nothing is
        wrong."""
        self._problems.append(problem)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            exchange = Exchange(scope, receive, send)
            with InRequest(exchange.request_id):
                await self._exchange(exchange)
        elif kind == "lifespan":
            await self._router(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _exchange(self, exchange: Exchange) -> None:
        """Handle one exchange and make sure that it ends in one response, whatever its handler does. Starlette's own
        handlers of exceptions see neither a cancellation nor an error after the head of the response."""
        scope = exchange.scope
        scope["exchange"] = exchange
        try:
            await self._router(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            # The server's grace period is over. This is the task's outermost frame: send the client an error.
            await self._refuse(
                exchange,
                TandemError(ErrorKind.DRAINING, "this gateway is shutting down; send the request to another gateway"),
            )
        except TandemError as error:
            await self._refuse(exchange, error)
        except Exception:
            _log.exception("request %s failed because of a defect of the gateway", exchange.request_id)
            message = f"internal error; the gateway's log has the reason under request_id={exchange.request_id}"
            await self._refuse(exchange, TandemError(ErrorKind.INTERNAL, message))
        finally:
            # These break reference cycles that only the garbage collector would free.
            exchange.late_error = None
            del scope["exchange"]
            if exchange.started and exchange.is_counted:
                self._measures.responded(exchange.status)

    async def _refuse(self, exchange: Exchange, error: TandemError) -> None:
        if not exchange.started:
            await error_response(error)(exchange.scope, exchange.receive, exchange.send)
        elif exchange.late_error is not None and not exchange.complete:
            await exchange.send({"type": "http.response.body", "body": exchange.late_error(error)})
        else:
            # The server closes a connection whose response is incomplete.
            _log.error(
                "the response to request %s is incomplete and its connection closed: %r", exchange.request_id, error
            )

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
    raise TandemError(ErrorKind.NOT_FOUND, f"unknown path {path}; /docs lists all paths")
