"""Exchange with the other gateways how many tokens each tenant was served, so that queues are fair over all of them."""

from __future__ import annotations

from tandem.admission.request_queue import RequestQueue
from tandem.gateway.context.supervise import BackgroundLoop
from tandem.stores.redis_client import StoreUnavailable
from tandem.stores.service_counters import ServiceCounters

PERIOD_S = 0.1
RETRY_S = 1.0
"""Seconds between two attempts to reach Redis; when it is back, all gateways retry at the same time."""


class FairnessSync:
    """Exchange with the other gateways, through Redis, how many tokens each tenant was served, so that the queues of
    all gateways share workers fairly.

    `queue` is this gateway's request queue. While Redis is unreachable, the queue is fair among its own requests
    only."""

    def __init__(self, queue: RequestQueue, counters: ServiceCounters) -> None:
        self._queue = queue
        self._counters = counters
        self._loop = BackgroundLoop("the exchange of service counters", self._exchange)
        self.start = self._loop.start

    async def stop(self) -> None:
        await self._loop.stop()
        await self._counters.close()

    async def _exchange(self) -> float:
        try:
            for service, num_tokens in await self._counters.exchange(self._queue.served()):
                self._queue.add_remote_usage(service, num_tokens)
        except StoreUnavailable:
            return RETRY_S
        return PERIOD_S
