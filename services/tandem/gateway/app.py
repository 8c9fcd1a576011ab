"""Compose the gateway's ASGI application: its routes, error handling and lifespan."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tandem.core.clock import Clock, SystemClock
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.context.interfaces import Authenticator, RequestDispatcher
from tandem.gateway.http.exchange import ClientDisconnected, Exchange, Receive, Scope, Send
from tandem.gateway.http.health import HealthRoutes
from tandem.gateway.http.openai_routes import MODELS_PREFIX, OpenAIRoutes
from tandem.gateway.http.openai_schema import (
    ChatChunk,
    ChatCompletion,
    DetokenizeReply,
    HealthReply,
    ModelCard,
    ModelList,
    ScrapeGroup,
    TextChunk,
    TextCompletion,
    TokenizeReply,
)
from tandem.gateway.http.openapi import OpenApiDocs
from tandem.gateway.http.routes import OF_BODIES, OF_COMPLETIONS, OF_EVERY_REQUEST, Handler, Route
from tandem.gateway.openai.output_spec import OutputSpecFactory
from tandem.gateway.openai.request_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tandem.gateway.serving.completions import CompletionService
from tandem.gateway.telemetry.gauges import watch_answers, watch_dispatch
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.gateway.telemetry.request_record import RequestObserver
from tandem.gateway.telemetry.request_recorder import RequestRecorder
from tandem.obs.logs.log_context import InRequest
from tandem.obs.metrics.metrics import Metrics
from tandem.obs.telemetry import Telemetry
from tandem.sched.state.slo_targets import NO_TARGETS, LatencyTargets

_NUM_ENCODERS = 2
_log = logging.getLogger(__name__)
_UNSERVED = {
    "/v1/embeddings": "embeddings",
    "/v1/responses": "the Responses API",
    "/v1/conversations": "the Responses API",
    "/v1/batches": "the Batch API (the lane `batch` of a completion is for work that can wait)",
    "/v1/files": "files",
    "/v1/uploads": "files",
    "/v1/vector_stores": "vector stores",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/audio": "audio",
    "/v1/realtime": "realtime sessions",
    "/v1/images": "images",
    "/v1/videos": "videos",
    "/v1/moderations": "moderations",
    "/v1/assistants": "assistants",
    "/v1/threads": "assistants",
    "/v1/evals": "evaluations",
    "/v1/containers": "containers",
    "/v1/messages": "Anthropic's Messages API",
    "/v1/load_lora_adapter": "LoRA adapters",
    "/v1/unload_lora_adapter": "LoRA adapters",
    "/v1/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/score": "scoring of pairs",
    "/score": "scoring of pairs",
    "/pooling": "pooling",
    "/classify": "classification",
}


class GatewayApp:
    """ASGI 3 application of the gateway, for any ASGI server or middleware. The gRPC server shares its `answers`."""

    __slots__ = ("_encoders", "_exact", "_measures", "_prefixes", "answers")

    def __init__(
        self, routes: Sequence[Route], answers: CompletionService, encoders: Executor, measures: RequestMetrics
    ) -> None:
        self.answers = answers
        self._exact: dict[str, dict[str, Handler]] = {}
        self._prefixes: dict[str, dict[str, Handler]] = {}
        self._encoders = encoders
        self._measures = measures
        self.serve(routes)

    def serve(self, routes: Sequence[Route]) -> None:
        """Add routes."""
        for route in routes:
            found = self._exact if route.prefix is None else self._prefixes
            found.setdefault(route.prefix or route.path, {})[route.method] = route.handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            exchange = Exchange(scope, receive, send)
            with InRequest(exchange.request_id):
                await self._exchange(exchange)
        elif kind == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _exchange(self, exchange: Exchange) -> None:
        """Handle one exchange and make sure that it ends in one response, whatever its handler does."""
        try:
            await self._route(exchange)
        except ClientDisconnected:
            return
        except asyncio.CancelledError:
            # The server's grace period is over. This is the task's outermost frame: send the client an error.
            await self._refuse(exchange, TandemError(ErrorKind.DRAINING, "the gateway is shutting down"))
        except TandemError as error:
            await self._refuse(exchange, error)
        except Exception:
            _log.exception("request %s failed", exchange.request_id)
            message = f"internal error (request {exchange.request_id})"
            await self._refuse(exchange, TandemError(ErrorKind.INTERNAL, message))
        finally:
            exchange.late_error = None  # breaks a reference cycle that only the garbage collector would free
            if exchange.started and exchange.is_counted:
                self._measures.responded(exchange.status)

    async def _refuse(self, exchange: Exchange, error: TandemError) -> None:
        if not exchange.started:
            await exchange.send_error(error)
        elif exchange.late_error is not None and not exchange.complete:
            await exchange.write(exchange.late_error(error), more=False)
        else:
            # The server closes a connection whose response is incomplete.
            _log.error("request %s failed after its response: %r", exchange.request_id, error)

    async def _route(self, exchange: Exchange) -> None:
        path, method = exchange.scope["path"], exchange.scope["method"]
        handlers = self._find(path)
        if handlers is None:
            unsupported = unsupported_feature(path)
            message = f"there is nothing at {path}" if unsupported is None else f"{path}: {unsupported}"
            raise TandemError(ErrorKind.NOT_FOUND, message)
        handler = handlers.get("GET" if method == "HEAD" else method)
        if handler is None:
            allowed = ", ".join(sorted(handlers))
            error = TandemError(ErrorKind.METHOD_NOT_ALLOWED, f"{path} takes {allowed}, not {method}")
            await exchange.send_error(error, [(b"allow", allowed.encode())])
            return
        await handler(exchange)

    def _find(self, path: str) -> dict[str, Handler] | None:
        if path in self._exact:
            return self._exact[path]
        matching = (
            handlers for prefix, handlers in self._prefixes.items() if path.startswith(prefix) and path != prefix
        )
        return next(matching, None)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                self._encoders.shutdown(wait=False, cancel_futures=True)
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})


def create_app(
    dispatch: RequestDispatcher,
    authenticator: Authenticator,
    config: GatewayConfig,
    *,
    telemetry: Telemetry | None = None,
    observers: Sequence[RequestObserver] = (),
    targets: LatencyTargets = NO_TARGETS,
    clock: Clock | None = None,
) -> GatewayApp:
    """Make the gateway's HTTP application over a dispatcher.

    `observers`: receive the record of every request that has ended. `clock`: the dispatcher's; the system's by default.
    `telemetry`: by default metrics that only `/metrics` exports, and no traces."""
    encoders = ThreadPoolExecutor(_NUM_ENCODERS, thread_name_prefix="tokenize")
    telemetry = telemetry or Telemetry(Metrics())
    measures = RequestMetrics(telemetry.metrics, targets)
    output_specs = OutputSpecFactory(config.tool_parser, config.reasoning_parser)
    recorder = RequestRecorder(clock or SystemClock(), measures, telemetry.tracer, observers, targets)
    answers = CompletionService(dispatch, encoders, recorder, output_specs)
    openai = OpenAIRoutes(answers, authenticator, config.max_body, config.heartbeat_s)
    reference = OpenApiDocs()
    watch_answers(telemetry.metrics, recorder)
    watch_dispatch(telemetry.metrics, dispatch)
    health = HealthRoutes(dispatch, authenticator, telemetry)
    routes = [*_answer_routes(openai), *_lookup_routes(openai), *_operator_routes(health), *reference.routes()]
    reference.write(routes)
    return GatewayApp(routes, answers, encoders, measures)


def _answer_routes(openai: OpenAIRoutes) -> list[Route]:
    return [
        Route(
            method="POST",
            path="/v1/chat/completions",
            handler=openai.chat,
            summary="Chat completion",
            body=ChatBody,
            reply=ChatCompletion,
            chunk=ChatChunk,
            errors=OF_COMPLETIONS,
        ),
        Route(
            method="POST",
            path="/v1/completions",
            handler=openai.completions,
            summary="Completion of one or several prompts",
            body=CompletionBody,
            reply=TextCompletion,
            chunk=TextChunk,
            errors=OF_COMPLETIONS,
        ),
    ]


def _lookup_routes(openai: OpenAIRoutes) -> list[Route]:
    return [
        Route(
            method="GET",
            path="/v1/models",
            handler=openai.models,
            summary="All models, one entry for each name or alias",
            reply=ModelList,
            errors=OF_EVERY_REQUEST,
        ),
        Route(
            method="GET",
            path=MODELS_PREFIX + "{model}",
            handler=openai.model,
            summary="One model",
            reply=ModelCard,
            errors=(*OF_EVERY_REQUEST, ErrorKind.MODEL_NOT_FOUND, ErrorKind.NO_WORKER),
        ),
        Route(
            method="POST",
            path="/tokenize",
            handler=openai.tokenize,
            summary="Token ids of a prompt or a conversation",
            body=TokenizeBody,
            reply=TokenizeReply,
            errors=(*OF_BODIES, ErrorKind.UNSUPPORTED),
        ),
        Route(
            method="POST",
            path="/detokenize",
            handler=openai.detokenize,
            summary="Text of token ids",
            body=DetokenizeBody,
            reply=DetokenizeReply,
            errors=OF_BODIES,
        ),
    ]


def _operator_routes(health: HealthRoutes) -> list[Route]:
    alive = "Liveness: 200 while this process answers"
    return [
        Route(method="GET", path="/health", handler=health.health, summary=alive, reply=HealthReply),
        Route(method="GET", path="/live", handler=health.health, summary=alive, reply=HealthReply),
        Route(
            method="GET",
            path="/ready",
            handler=health.ready,
            summary="Readiness: 200 when requests can be served",
            reply=HealthReply,
            not_ready=HealthReply,
        ),
        Route(
            method="GET",
            path="/metrics",
            handler=health.metrics,
            summary="Metrics for Prometheus",
            text=CONTENT_TYPE_PLAIN_0_0_4.partition(";")[0],
        ),
        Route(
            method="GET",
            path="/metrics/targets",
            handler=health.targets,
            summary="Addresses of the workers' own metrics, for Prometheus' HTTP service discovery",
            reply=ScrapeGroup,
            is_list=True,
        ),
    ]


def unsupported_feature(path: str) -> str | None:
    """Return a sentence saying that the feature behind a path is not served; None for an unknown path."""
    for prefix, feature in _UNSERVED.items():
        if path == prefix or path.startswith(prefix + "/"):
            return f"Tandem does not serve {feature}"
    return None
