"""Describe the routes of the HTTP API beside their handlers, match and call them with Starlette, and end each exchange
in one response."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.http.exchange import Exchange, error_response, report_defect
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.obs.logs.log_context import in_request

_log = logging.getLogger(__name__)
Handler = Callable[[Exchange], Awaitable[Response | None]]
"""Function that answers an exchange. It returns the response, or None where it has sent the response itself; it may
raise TandemError."""
Marked = TypeVar("Marked", bound=Callable[..., Awaitable[Response | None]])

OF_EVERY_REQUEST = (ErrorKind.INVALID_REQUEST, ErrorKind.UNAUTHENTICATED, ErrorKind.DRAINING, ErrorKind.INTERNAL)
OF_BODIES = (*OF_EVERY_REQUEST, ErrorKind.BODY_TOO_LARGE, ErrorKind.MODEL_NOT_FOUND, ErrorKind.NO_WORKER)
OF_COMPLETIONS = tuple(kind for kind in ErrorKind if kind not in (ErrorKind.METHOD_NOT_ALLOWED, ErrorKind.FORBIDDEN))


@dataclass(frozen=True, slots=True)
class Operation:
    """Describe one method of one path for openapi.json. As the decorator of a handler it also makes `routes_of` yield a
    route to that handler.

    `path`: in Starlette's syntax. `body`: type of the request's body; None: there is none. `reply`: type of the body of
    a 200. `text`: media type of a 200 where `reply` is None. `not_ready`: type of the body of a 503 that is no error.
    `chunk`: type of one event of a stream; None: the operation never streams. `errors`: all kinds that the handler may
    raise."""

    method: str
    path: str
    summary: str
    body: Any = None
    reply: Any = None
    chunk: Any = None
    not_ready: Any = None
    text: str = ""
    errors: tuple[ErrorKind, ...] = ()

    def __call__(self, handler: Marked) -> Marked:
        handler.__dict__.setdefault("operations", []).append(self)
        return handler


class HandlerRoute(Route):
    """Match one operation's path, and call its handler with the exchange that the application put into the ASGI scope.

    A request for the path with a method that none of the path's routes has gets METHOD_NOT_ALLOWED. This class calls
    the handler itself, because Starlette's way of calling a function would wrap each message of a stream.
    """

    def __init__(self, operation: Operation, handler: Handler) -> None:
        super().__init__(operation.path, handler, methods=[operation.method])
        self.operation = operation
        # Starlette's `$` also matches before a line break at the end, and its `.` matches no line break.
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z", re.DOTALL)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        if method in (self.methods or ()):
            response = await self.endpoint(scope["exchange"])
        else:
            routes = [route for route in scope["router"].routes if route.matches(scope)[0] is not Match.NONE]
            allowed = ", ".join(sorted(method for route in routes for method in route.methods))
            error = TandemError(ErrorKind.METHOD_NOT_ALLOWED, f"{scope['path']} accepts {allowed}, not {method}")
            response = error_response(error, {"allow": allowed})
        if response is not None:
            await response(scope, receive, send)


def routes_of(owner: object) -> Iterator[HandlerRoute]:
    """Yield a route for each method of `owner` that an Operation decorates, in the order of their definition."""
    for name, member in vars(type(owner)).items():
        for operation in getattr(member, "operations", ()):
            yield HandlerRoute(operation, getattr(owner, name))


class RoutedApp:
    """Serve HTTP as an ASGI 3 application: pass each exchange to `router`, and turn every error into a response.
    `measures` counts the responses."""

    def __init__(self, router: Router, measures: RequestMetrics) -> None:
        self._router = router
        self._measures = measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            exchange = Exchange(scope, receive, send)
            with in_request(exchange.request_id):
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
            await self._refuse(exchange, report_defect(exchange.request_id))
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
            await exchange.write(exchange.late_error(error), more=False)
        else:
            # The server closes a connection whose response is incomplete.
            _log.error(
                "the response to request %s is incomplete and its connection closed: %r", exchange.request_id, error
            )
