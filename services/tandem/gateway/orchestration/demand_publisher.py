"""Tells planners every second what this gateway was asked for; never counts it and never waits for anybody."""

from __future__ import annotations

import asyncio
import contextlib

from tandem.core.clock import Clock
from tandem.core.ids import GatewayId
from tandem.gateway.context.supervise import log_and_continue
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
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="demand-beat")

    async def stop(self) -> None:
        """A last word is of no use: what has come until now is over."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            with contextlib.suppress(DemandUnavailable):
                await self._board.withdraw(self._gateway)
        await self._board.close()

    async def _run(self) -> None:
        while True:
            async with log_and_continue("telling of demand"):
                with contextlib.suppress(DemandUnavailable):  # `RedisHealth` has said so
                    await self._board.publish(self._record())
                await asyncio.sleep(PERIOD_S)

    def _record(self) -> DemandRecord:
        return DemandRecord(
            gateway=self._gateway,
            totals=self._tally.totals(),
            backlog=self._tally.backlog(),
            lived_s=self._clock.now() - self._began,
        )
