"""Count the requests of a gateway and how they are served, by model, and publish the counts for planners."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from tandem.core.clock import Clock
from tandem.core.ids import GatewayId
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.gateway.context.supervise import BackgroundLoop
from tandem.gateway.telemetry.request_record import RequestRecord
from tandem.scaling.demand_totals import DemandTotals, QueueBacklog
from tandem.sched.state.slo_targets import LatencyTargets
from tandem.stores.demand_store import DemandRecord, DemandStore
from tandem.stores.redis_client import StoreUnavailable

PERIOD_S = 1.0


class DemandCounter:
    """Count, by model, how many requests arrive, how many tokens their prompts have, and how the requests end.

    `targets`: latency targets by lane, which decide what counts as late. `backlog`: function that returns the requests
    that wait now, by model. All calls must be on the event loop.
    """

    def __init__(self, targets: LatencyTargets, backlog: Callable[[], Mapping[str, QueueBacklog]]) -> None:
        self.backlog = backlog
        self._totals: defaultdict[str, DemandTotals] = defaultdict(DemandTotals)
        self._slos = {lane.label: targets.lane(lane) for lane in Lane}

    def totals(self) -> Mapping[str, DemandTotals]:
        """Return a copy of the counts since this gateway process started, by model."""
        return {model: replace(totals) for model, totals in self._totals.items()}

    def on_admitted(self, request: Request) -> None:
        """Count the arrival of a request that passed its tenant's quota, whether or not workers have room for it."""
        self._totals[request.model].add_arrival(len(request.prompt_tokens))

    def on_first_token(self, request: Request, num_cached: int) -> None:
        """Count a request whose first token was sampled; `num_cached` tokens of its prompt were found in a cache."""
        self._totals[request.model].add_prompt(len(request.prompt_tokens), num_cached)

    def answered(self, record: RequestRecord) -> None:
        totals = self._totals.get(record.model)
        if totals is None:
            return  # refused before its model was known
        is_late = record.first_token_s is not None and self._slos[record.lane].violates_ttft(record.first_token_s)
        totals.add_end(
            record.outcome,
            is_late=is_late,
            num_output=record.usage.num_output,
            num_gaps=record.num_gaps,
            num_late_gaps=record.num_late_gaps,
        )


class DemandPublisher:
    """Publish the counts of `counter` in Redis every `PERIOD_S` seconds, for planners.

    While Redis is unreachable, nothing is published. No count is lost by that, because each record has the totals since
    the start of the gateway."""

    def __init__(self, gateway: GatewayId, store: DemandStore, counter: DemandCounter, clock: Clock) -> None:
        self._gateway = gateway
        self._store = store
        self._counter = counter
        self._clock = clock
        self._began = clock.now()
        self._loop = BackgroundLoop("publishing of demand", self._publish)
        self.start = self._loop.start

    async def stop(self) -> None:
        """Stop publishing and delete this gateway's record, so that planners no longer count its requests."""
        await self._loop.stop()
        with contextlib.suppress(StoreUnavailable):
            await self._store.withdraw(self._gateway)
        await self._store.close()

    async def _publish(self) -> float:
        record = DemandRecord(
            gateway=self._gateway,
            totals=self._counter.totals(),
            backlog=self._counter.backlog(),
            lived_s=self._clock.now() - self._began,
        )
        with contextlib.suppress(StoreUnavailable):  # `RedisHealth` reports it
            await self._store.publish(record)
        return PERIOD_S
