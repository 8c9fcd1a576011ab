"""Keeps a gateway's line fair together with those of other gateways; never decides whose turn it is."""

from __future__ import annotations

import asyncio

from tandem.admission.request_queue import RequestQueue
from tandem.gateway.context.supervise import log_and_continue
from tandem.stores.service_counters import CountersUnavailable, ServiceCounters

PERIOD_S = 0.1
RETRY_S = 1.0
"""Between two looks for a Redis that is away, which all gateways take at once when it comes back."""


class FairnessSync:
    """Exchanges a line's counters until it is stopped. While Redis does not answer the line is fair over what this
    gateway itself serves."""

    def __init__(self, line: RequestQueue, counters: ServiceCounters) -> None:
        self._line = line
        self._counters = counters
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="fair-share")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._counters.close()

    async def _run(self) -> None:
        is_reachable = True
        while True:
            async with log_and_continue("the exchange of what gateways serve"):
                try:
                    for service, num_tokens in await self._counters.exchange(self._line.served()):
                        self._line.add_remote_usage(service, num_tokens)
                    is_reachable = True
                except CountersUnavailable:
                    is_reachable = False
                await asyncio.sleep(PERIOD_S if is_reachable else RETRY_S)
