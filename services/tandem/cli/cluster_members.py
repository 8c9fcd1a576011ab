"""List the workers in the registry, set their roles, and open authenticated stubs to them, for CLI commands."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import WorkerRef
from tandem.stores.redis_client import StoreUnavailable
from tandem.stores.worker_record import WorkerRecord
from tandem.stores.worker_registry import WorkerRegistry
from tandem.wire.gen.worker_pb2_grpc import WorkerStub
from tandem.wire.peer_auth import PeerAuth


class ClusterMembers:
    """Registry and credentials of one cluster; `members_of` makes it."""

    def __init__(self, registry: WorkerRegistry, trust: PeerAuth) -> None:
        self._registry = registry
        self.trust = trust

    async def all(self) -> tuple[WorkerRecord, ...]:
        """Return all registered workers, sorted by id."""
        return await self._registry.list()

    async def find(self, worker: str) -> WorkerRecord:
        """Return the record of a worker id. Raises TandemError(NOT_FOUND)."""
        records = await self.all()
        for record in records:
            if record.worker.id == worker:
                return record
        known = ", ".join(record.worker.id for record in records) or "none is registered"
        raise TandemError(ErrorKind.NOT_FOUND, f"no worker {worker!r}; there are: {known}")

    async def set_role(self, record: WorkerRecord, role: str) -> None:
        """Set a worker's role. Raises TandemError(NOT_FOUND) if this incarnation is not registered any more."""
        if not await self._registry.set_role(record.worker, role):
            raise TandemError(ErrorKind.NOT_FOUND, f"worker {record.worker.id} is not registered any more")

    @asynccontextmanager
    async def stub(self, worker: WorkerRef) -> AsyncIterator[WorkerStub]:
        async with open_stub(self.trust, worker) as stub:
            yield stub


@asynccontextmanager
async def open_stub(trust: PeerAuth, worker: WorkerRef) -> AsyncIterator[WorkerStub]:
    """Open a channel and make a stub for one incarnation of a worker; close the channel at the end."""
    async with trust.open_channel(worker.address) as channel:
        yield trust.stub(channel, worker.incarnation)


@asynccontextmanager
async def members_of(config: Config) -> AsyncIterator[ClusterMembers]:
    """Connect to the cluster that the settings name.

    Raises TandemError(INVALID_REQUEST) if they name none, and TandemError(NO_WORKER) if Redis does not answer in the
    block.
    """
    if not config.redis.url:
        message = "workers are found in Redis: say where with --redis-url"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="redis.url")
    trust = PeerAuth.of(f"cli-{socket.gethostname()}-{os.getpid()}", config.cluster)
    registry = WorkerRegistry(config.redis.url, config.redis.namespace)
    try:
        yield ClusterMembers(registry, trust)
    except StoreUnavailable as error:
        raise TandemError(ErrorKind.NO_WORKER, f"the registry does not answer: {error}") from error
    finally:
        await registry.close()
