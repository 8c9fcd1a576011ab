"""List the workers in the registry, set their roles, and open authenticated stubs to them, for CLI commands."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import WorkerRef
from tandem.stores.redis_client import StoreUnavailable
from tandem.stores.worker_registry import WorkerRecord, WorkerRegistry
from tandem.wire.gen.worker_pb2_grpc import WorkerStub
from tandem.wire.peer_auth import PeerAuth


class ClusterMembers:
    """The workers of one cluster: lists and finds them, sets their roles, and connects to them.

    `members_of` creates it. Methods raise StoreUnavailable when Redis does not answer, which `members_of` converts into
    a TandemError. `trust`: this process's credentials for calls to workers."""

    def __init__(self, registry: WorkerRegistry, trust: PeerAuth) -> None:
        self._registry = registry
        self.trust = trust

    async def all(self) -> tuple[WorkerRecord, ...]:
        """Return the records of all registered workers, sorted by worker id."""
        return await self._registry.list()

    async def find(self, worker: str) -> WorkerRecord:
        """Return the record of the registered worker with the id `worker`.

        Raises TandemError(NOT_FOUND), which lists the known ids, if there is none."""
        records = await self.all()
        for record in records:
            if record.worker.id == worker:
                return record
        known = ", ".join(record.worker.id for record in records) or "none"
        raise TandemError(ErrorKind.NOT_FOUND, f"worker {worker!r} is not registered in Redis; registered are: {known}")

    async def set_role(self, record: WorkerRecord, role: str) -> None:
        """Set the role in which routers use the worker of `record`.

        Raises TandemError(NOT_FOUND) if that incarnation of the worker is not registered any more."""
        if not await self._registry.set_role(record.worker, role):
            raise TandemError(
                ErrorKind.NOT_FOUND,
                f"worker {record.worker.id} is not registered any more: list the workers again",
            )

    def stub(self, worker: WorkerRef) -> AbstractAsyncContextManager[WorkerStub]:
        return open_stub(self.trust, worker)


@asynccontextmanager
async def open_stub(trust: PeerAuth, worker: WorkerRef) -> AsyncIterator[WorkerStub]:
    """Return a context manager that opens a channel to a worker, yields a gRPC stub for it, and closes the channel.

    The worker accepts the calls only in the incarnation that `worker` names."""
    async with trust.open_channel(worker.address) as channel:
        yield trust.stub(channel, worker.incarnation)


@asynccontextmanager
async def members_of(config: Config) -> AsyncIterator[ClusterMembers]:
    """Return a context manager that connects to the cluster that the settings name, and disconnects at the end.

    Raises TandemError(INVALID_REQUEST) if the settings have no Redis URL, and converts StoreUnavailable, raised inside
    the `with` block when Redis does not answer, into TandemError(NO_WORKER)."""
    if not config.redis.url:
        message = "redis.url is empty: set --redis-url to the Redis of the cluster, in which workers are registered"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="redis.url")
    trust = PeerAuth.of(f"cli-{socket.gethostname()}-{os.getpid()}", config.cluster)
    registry = WorkerRegistry(config.redis.url, config.redis.namespace)
    try:
        yield ClusterMembers(registry, trust)
    except StoreUnavailable as error:
        raise TandemError(ErrorKind.NO_WORKER, f"Redis does not answer: {error}; check redis.url") from error
    finally:
        await registry.close()
