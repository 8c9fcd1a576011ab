"""Serve the health, readiness and metrics endpoints of this process."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import UNSET

from tandem.gateway.context.interfaces import Authenticator, RequestDispatcher
from tandem.gateway.http.exchange import Exchange
from tandem.gateway.http.openai_schema import HealthReply, ScrapeGroup, ScrapeLabels
from tandem.obs.telemetry import Telemetry

PROBES = frozenset({b"/health", b"/live", b"/ready"})
"""Paths that are answered also on connections beyond `max_connections`."""


class HealthRoutes:
    """Handlers of `/health` and `/live` (liveness: restart the process when they fail), `/ready` (readiness: send
    traffic while it succeeds), `/metrics` and `/metrics/targets` (for Prometheus)."""

    __slots__ = ("_authenticator", "_dispatch", "_telemetry")

    def __init__(self, dispatch: RequestDispatcher, authenticator: Authenticator, telemetry: Telemetry) -> None:
        self._dispatch = dispatch
        self._authenticator = authenticator
        self._telemetry = telemetry

    async def health(self, exchange: Exchange) -> None:
        await exchange.send_json(200, msgspec.json.encode(HealthReply("ok")))

    async def ready(self, exchange: Exchange) -> None:
        """Send 503 with what is missing until requests can be served, then 200. Problems that stop no request are
        reported as `warning`."""
        missing = self._dispatch.ready()
        if missing is None:
            problems = [problem for problem in (self._authenticator.problem(), self._dispatch.problem()) if problem]
            reply = HealthReply("ready", warning="; ".join(problems) or UNSET)
            await exchange.send_json(200, msgspec.json.encode(reply))
        else:
            body = msgspec.json.encode(HealthReply("not_ready", missing))
            await exchange.send_json(503, body, [(b"retry-after", b"1")])

    async def metrics(self, exchange: Exchange) -> None:
        """Send the metrics, formatted on a thread because formatting thousands of series would delay the streams."""
        accept = (exchange.header(b"accept") or b"").decode("latin-1")
        content_type, body = await asyncio.to_thread(self._telemetry.exposition, accept)
        await exchange.send_body(content_type, body)

    async def targets(self, exchange: Exchange) -> None:
        """Send the addresses of the live workers' own metrics, in the format of Prometheus' HTTP service discovery
        (https://prometheus.io/docs/prometheus/latest/http_sd/)."""
        found = [
            ScrapeGroup([target.address], ScrapeLabels(target.pool, target.worker, target.model))
            for target in self._dispatch.scrape_targets()
        ]
        await exchange.send_json(200, msgspec.json.encode(found))
