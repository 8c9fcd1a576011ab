"""Tells planners every second what this gateway was asked for; never counts it and never waits for anybody."""

from __future__ import annotations

import contextlib

from tandem.core.clock import Clock
from tandem.core.ids import GatewayId
from tandem.gateway.context.supervise import BackgroundLoop
from tandem.gateway.orchestration.demand import DemandCounter
from tandem.stores.demand_store import DemandRecord, DemandStore, DemandUnavailable

PERIOD_S = 1.0


class DemandPublisher:
    """What `tally` says, at each beat. While Redis is away nothing is told, and nothing is
    lost: they are totals."""

    def __init__(self, gateway: GatewayId, board: DemandStore, tally: DemandCounter, clock: Clock) -> None:
        self._gateway = gateway
        self._board = board
        self._tally = tally
        self._clock = clock
        self._began = clock.now()
        self._loop = BackgroundLoop("telling of demand", self._publish)

    async def start(self) -> None:
        self._loop.start()

    async def stop(self) -> None:
        """A last word is of no use: what has come until now is over."""
        await self._loop.stop()
        with contextlib.suppress(DemandUnavailable):
            await self._board.withdraw(self._gateway)
        await self._board.close()

    async def _publish(self) -> float:
        with contextlib.suppress(DemandUnavailable):  # `RedisHealth` has said so
            await self._board.publish(self._record())
        return PERIOD_S

    def _record(self) -> DemandRecord:
        return DemandRecord(
            gateway=self._gateway,
            totals=self._tally.totals(),
            backlog=self._tally.backlog(),
            lived_s=self._clock.now() - self._began,
        )
