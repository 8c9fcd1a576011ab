"""Exchange service counters with the other gateways, so that fair queueing holds over all of them."""

from __future__ import annotations

import asyncio

from tandem.admission.request_queue import RequestQueue
from tandem.gateway.context.supervise import log_and_continue
from tandem.stores.redis_client import StoreUnavailable
from tandem.stores.service_counters import ServiceCounters

PERIOD_S = 0.1
RETRY_S = 1.0
"""Between two attempts to reach Redis; all gateways retry at once when it comes back."""


class FairnessSync:
    """Exchange the counters of a request queue until stopped. While Redis is down the queue is fair over its own
    requests only."""

    def __init__(self, queue: RequestQueue, counters: ServiceCounters) -> None:
        self._queue = queue
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
            async with log_and_continue("the exchange of service counters"):
                try:
                    for service, num_tokens in await self._counters.exchange(self._queue.served()):
                        self._queue.add_remote_usage(service, num_tokens)
                    is_reachable = True
                except StoreUnavailable:
                    is_reachable = False
                await asyncio.sleep(PERIOD_S if is_reachable else RETRY_S)
