"""Answers how this process does, to those who run it; never decides anything."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from tandem.gateway.asgi import Exchange
from tandem.gateway.chronicle import Chronicles
from tandem.gateway.counters import Counters
from tandem.gateway.openai_reply import HealthReply
from tandem.gateway.ports import Dispatch, Doorkeeper, Gauges

PROBES = frozenset({b"/health", b"/live", b"/ready"})
"""Answered also where connections are too many for anything else."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Health:
    """`/health` and `/live` are for whoever restarts the process, `/ready` for whoever sends it traffic."""

    __slots__ = ("_chronicles", "_counters", "_dispatch", "_doorkeeper", "_others")

    def __init__(
        self,
        dispatch: Dispatch,
        doorkeeper: Doorkeeper,
        counters: Counters,
        chronicles: Chronicles,
        others: Sequence[Gauges] = (),
    ) -> None:
        self._others = tuple(others)
        self._dispatch = dispatch
        self._doorkeeper = doorkeeper
        self._counters = counters
        self._chronicles = chronicles

    async def health(self, exchange: Exchange) -> None:
        await exchange.send_json(200, msgspec.json.encode(HealthReply("ok")))

    async def ready(self, exchange: Exchange) -> None:
        """503 with what is missing, until requests can be served. What is wrong and stops nobody is told all the
        same."""
        missing = self._dispatch.ready()
        if missing is None:
            await exchange.send_json(
                200, msgspec.json.encode(HealthReply("ready", warning=self._doorkeeper.problem() or UNSET))
            )
        else:
            body = msgspec.json.encode(HealthReply("not_ready", missing))
            await exchange.send_json(503, body, [(b"retry-after", b"1")])

    async def metrics(self, exchange: Exchange) -> None:
        gauges: dict[str, float] = {
            "tandem_open_requests": self._chronicles.num_open,
            "tandem_queued_requests": self._dispatch.num_queued(),
            "tandem_served_models": len(self._dispatch.models()),
            "tandem_ready": self._dispatch.ready() is None,
            **{f'tandem_live_workers{{pool="{pool}"}}': n for pool, n in self._dispatch.num_live().items()},
        }
        for worker, state in self._dispatch.breakers().items():
            gauges[f'tandem_worker_breaker{{worker="{worker}"}}'] = state.value
        counts: dict[str, int] = {}
        for other in self._others:
            gauges |= other.gauges()
            counts |= other.counts()
        await exchange.send_text(METRICS_TYPE, self._counters.text(gauges, counts))
