"""Keeps one worker's entry in the registry alive; never decides what its loss means."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from tandem.stores.worker_record import WorkerRecord
from tandem.stores.worker_registry import RegistryUnavailable, WorkerRegistry

BEATS_PER_TTL = 3

_log = logging.getLogger(__name__)


class Registration(Enum):
    PENDING = "pending"
    REGISTERED = "registered"
    SUPERSEDED = "superseded"
    """A later life of this worker holds the id: two processes were given one name."""
    UNREACHABLE = "unreachable"


class Heartbeat:
    """Publishes a record over and over. `state` is what became of the last beat; `told` is given what routers take the
    worker for, at each beat that registers it."""

    def __init__(
        self, registry: WorkerRegistry, record: WorkerRecord, told: Callable[[str], None] = lambda role: None
    ) -> None:
        self._registry = registry
        self._record = record
        self._told = told
        self.state = Registration.PENDING

    async def run(self) -> None:
        """Beat until cancelled, then withdraw the entry as well as Redis allows."""
        try:
            while True:
                self._enter(await self._beat())
                await asyncio.sleep(self._registry.ttl_s / BEATS_PER_TTL)
        finally:
            with contextlib.suppress(RegistryUnavailable):
                await self._registry.withdraw(self._record.worker)

    async def _beat(self) -> Registration:
        try:
            standing = await self._registry.publish(self._record)
        except RegistryUnavailable:
            return Registration.UNREACHABLE
        if standing is None:
            return Registration.SUPERSEDED
        # A registry that has lost everything hears it from here.
        self._record = replace(self._record, role=standing.role)
        self._told(self._record.effective_role)
        return Registration.REGISTERED

    def _enter(self, state: Registration) -> None:
        if state is self.state:
            return
        if state is Registration.REGISTERED:
            _log.info("%s is registered", self._record.worker)
        elif state is Registration.SUPERSEDED:
            _log.warning("%s is superseded: a later worker of that id is registered", self._record.worker)
        self.state = state

    def __repr__(self) -> str:
        return f"<heartbeat of {self._record.worker} {self.state.value}>"
