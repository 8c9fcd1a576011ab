"""Serve the health and readiness endpoints of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import UNSET
from starlette.responses import Response

from tandem.gateway.context.interfaces import RequestDispatcher
from tandem.gateway.http.exchange import Exchange, json_response
from tandem.gateway.http.openai_schema import HealthReply
from tandem.gateway.http.routes import Operation

PROBES = frozenset({b"/health", b"/live", b"/ready"})
"""Paths of health probes, which are answered also on connections beyond `HttpLimits.max_connections`."""
_ALIVE = "Liveness: 200 while this process answers"
_READY = "Readiness: 200 when requests can be served"


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
