"""Composes the gateway's ASGI application: routes, errors, lifespan; never does a route's work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.answers import Answers
from tandem.gateway.asgi import ClientGone, Exchange, Receive, Scope, Send
from tandem.gateway.health import Health
from tandem.gateway.openai_http import MODELS_PREFIX, OpenAIRoutes
from tandem.gateway.ports import Dispatch, Doorkeeper

Handler = Callable[[Exchange], Awaitable[None]]

_NUM_ENCODERS = 2
_log = logging.getLogger(__name__)


class GatewayApp:
    """A plain ASGI 3 application; any ASGI server can run it, and any middleware wrap it."""

    __slots__ = ("_encoders", "_model", "_routes")

    def __init__(
        self, routes: Mapping[str, Mapping[str, Handler]], model: Mapping[str, Handler], encoders: Executor
    ) -> None:
        """`routes`: path -> method -> handler; `model` is for the paths below `/v1/models/`."""
        self._routes = routes
        self._model = model
        self._encoders = encoders

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            await self._exchange(Exchange(scope, receive, send))
        elif kind == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _exchange(self, exchange: Exchange) -> None:
        """Every exchange ends here in one response, whatever its handler does."""
        try:
            await self._route(exchange)
        except ClientGone:
            return
        except asyncio.CancelledError:
            # The server's grace is over. This is the outermost frame of the task, and the client deserves a word.
            await self._refuse(exchange, TandemError(ErrorKind.DRAINING, "the gateway is shutting down"))
        except TandemError as error:
            await self._refuse(exchange, error)
        except Exception:
            _log.exception("request %s failed", exchange.request_id)
            message = f"internal error (request {exchange.request_id})"
            await self._refuse(exchange, TandemError(ErrorKind.INTERNAL, message))

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
        handlers = self._routes.get(path)
        if handlers is None and path.startswith(MODELS_PREFIX) and path != MODELS_PREFIX:
            handlers = self._model
        if handlers is None:
            raise TandemError(ErrorKind.NOT_FOUND, f"there is nothing at {path}")
        handler = handlers.get("GET" if method == "HEAD" else method)
        if handler is None:
            allowed = ", ".join(sorted(handlers))
            error = TandemError(ErrorKind.METHOD_NOT_ALLOWED, f"{path} takes {allowed}, not {method}")
            await exchange.send_error(error, [(b"allow", allowed.encode())])
            return
        await handler(exchange)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                self._encoders.shutdown(wait=False, cancel_futures=True)
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})


def create_app(dispatch: Dispatch, doorkeeper: Doorkeeper, config: GatewayConfig) -> GatewayApp:
    """The gateway's HTTP front over `dispatch`."""
    encoders = ThreadPoolExecutor(_NUM_ENCODERS, thread_name_prefix="tokenize")
    openai = OpenAIRoutes(dispatch, Answers(dispatch, encoders), doorkeeper, config.max_body)
    health = Health(dispatch, doorkeeper)
    routes: dict[str, dict[str, Handler]] = {
        "/v1/chat/completions": {"POST": openai.chat},
        "/v1/completions": {"POST": openai.completions},
        "/v1/models": {"GET": openai.models},
        "/health": {"GET": health.health},
        "/ready": {"GET": health.ready},
    }
    return GatewayApp(routes, {"GET": openai.model}, encoders)
