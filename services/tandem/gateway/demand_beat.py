"""Tells planners every second what this gateway was asked for; never counts it and never waits for anybody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from tandem.core.ids import GatewayId
from tandem.gateway.background import surviving
from tandem.stores.demand import Backlog, DemandBoard, DemandRecord, DemandTotals, DemandUnavailable

PERIOD_S = 1.0


class DemandBeat:
    """`totals` and `backlog` by model, asked for at each beat. While Redis is away nothing is told, and nothing is
    lost: they are totals."""

    def __init__(
        self,
        gateway: GatewayId,
        board: DemandBoard,
        totals: Callable[[], Mapping[str, DemandTotals]],
        backlog: Callable[[], Mapping[str, Backlog]],
    ) -> None:
        self._gateway = gateway
        self._board = board
        self._totals = totals
        self._backlog = backlog
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
            async with surviving("telling of demand"):
                with contextlib.suppress(DemandUnavailable):  # `RedisHealth` has said so
                    await self._board.tell(self._record())
                await asyncio.sleep(PERIOD_S)

    def _record(self) -> DemandRecord:
        return DemandRecord(gateway=self._gateway, totals=self._totals(), backlog=self._backlog())
