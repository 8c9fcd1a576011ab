"""Answers how this process does, to those who run it; never decides anything."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import UNSET

from tandem.gateway.context.interfaces import Authenticator, RequestDispatcher
from tandem.gateway.http.exchange import Exchange
from tandem.gateway.http.openai_schema import HealthReply, ScrapeGroup, ScrapeLabels
from tandem.obs.telemetry import Telemetry

PROBES = frozenset({b"/health", b"/live", b"/ready"})
"""Answered also where connections are too many for anything else."""


class HealthRoutes:
    """`/health` and `/live` are for whoever restarts the process, `/ready` for whoever sends it traffic, `/metrics` and
    `/metrics/targets` for Prometheus."""

    __slots__ = ("_dispatch", "_doorkeeper", "_telemetry")

    def __init__(self, dispatch: RequestDispatcher, doorkeeper: Authenticator, telemetry: Telemetry) -> None:
        self._dispatch = dispatch
        self._doorkeeper = doorkeeper
        self._telemetry = telemetry

    async def health(self, exchange: Exchange) -> None:
        await exchange.send_json(200, msgspec.json.encode(HealthReply("ok")))

    async def ready(self, exchange: Exchange) -> None:
        """503 with what is missing, until requests can be served. What is wrong and stops nobody is told all the
        same."""
        missing = self._dispatch.ready()
        if missing is None:
            problems = [problem for problem in (self._doorkeeper.problem(), self._dispatch.problem()) if problem]
            reply = HealthReply("ready", warning="; ".join(problems) or UNSET)
            await exchange.send_json(200, msgspec.json.encode(reply))
        else:
            body = msgspec.json.encode(HealthReply("not_ready", missing))
            await exchange.send_json(503, body, [(b"retry-after", b"1")])

    async def metrics(self, exchange: Exchange) -> None:
        """On a thread, because thousands of series take longer to write than a stream may stand still."""
        accept = (exchange.header(b"accept") or b"").decode("latin-1")
        content_type, body = await asyncio.to_thread(self._telemetry.exposition, accept)
        await exchange.send_body(content_type, body)

    async def targets(self, exchange: Exchange) -> None:
        """Live workers' own metrics, as Prometheus' discovery over HTTP reads them
        (https://prometheus.io/docs/prometheus/latest/http_sd/)."""
        found = [
            ScrapeGroup([target.address], ScrapeLabels(target.pool, target.worker, target.model))
            for target in self._dispatch.scrape_targets()
        ]
        await exchange.send_json(200, msgspec.json.encode(found))
