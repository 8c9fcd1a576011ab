"""Route HTTP exchanges to their handlers, and end each in one response."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import ClientDisconnect
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.http.exchange import Exchange, error_response
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.obs.logs.log_context import in_request

_log = logging.getLogger(__name__)


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
