"""Keep one worker's entry in the registry alive with periodic heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from tandem.stores.redis_client import StoreUnavailable
from tandem.stores.worker_record import WorkerRecord
from tandem.stores.worker_registry import WorkerRegistry

BEATS_PER_TTL = 3

_log = logging.getLogger(__name__)


class Registration(Enum):
    """State of a worker's entry in the registry after the last heartbeat."""

    PENDING = "pending"
    REGISTERED = "registered"
    SUPERSEDED = "superseded"
    """A later incarnation holds this worker id, because two processes were given the same id."""
    UNREACHABLE = "unreachable"


class Heartbeat:
    """Keep one worker's entry in the registry: publish `record` three times within the entry's time to live.

    `state`: the result of the last heartbeat. `on_role`: function that is called at each successful heartbeat with the
    role by which routers use the worker. This is the role that an operator or planner has set, else the role of the
    worker's pool.
    """

    def __init__(
        self, registry: WorkerRegistry, record: WorkerRecord, on_role: Callable[[str], None] = lambda role: None
    ) -> None:
        self._registry = registry
        self._record = record
        self._on_role = on_role
        self.state = Registration.PENDING

    async def run(self) -> None:
        """Send heartbeats until the task is cancelled, then remove the entry if Redis is reachable."""
        try:
            while True:
                self._enter(await self._beat())
                await asyncio.sleep(self._registry.ttl_s / BEATS_PER_TTL)
        finally:
            with contextlib.suppress(StoreUnavailable):
                await self._registry.withdraw(self._record.worker)

    async def _beat(self) -> Registration:
        try:
            role = await self._registry.publish(self._record)
        except StoreUnavailable:
            return Registration.UNREACHABLE
        if role is None:
            return Registration.SUPERSEDED
        # The next heartbeat restores the role in a registry that has lost its data.
        self._record = replace(self._record, role=role)
        self._on_role(self._record.effective_role)
        return Registration.REGISTERED

    def _enter(self, state: Registration) -> None:
        if state is self.state:
            return
        if state is Registration.REGISTERED:
            _log.info("worker %s is registered in Redis", self._record.worker)
        elif state is Registration.SUPERSEDED:
            _log.warning("worker %s gets no requests: a later worker with its id is registered", self._record.worker)
        self.state = state
