"""Read the registered workers from the registry and the state of each from the worker itself; drain workers on
request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc.aio

from tandem.core.addresses import host_of
from tandem.core.config import Config
from tandem.core.errors import TandemError
from tandem.core.ids import WorkerRef
from tandem.core.worker_load import WorkerLoad
from tandem.scaling.cluster_state import WorkerCapacity
from tandem.scaling.worker_state import WorkerState, capacity_of
from tandem.stores.worker_registry import WorkerRecord, WorkerRegistry
from tandem.wire.gen import worker_pb2
from tandem.wire.gen.worker_pb2_grpc import WorkerStub
from tandem.wire.peer_auth import PeerAuth, reason_of
from tandem.wire.worker_codec import decode_load, decode_step_cost

ANSWER_S = 3.0
MAX_CONCURRENT_CALLS = 32
"""Largest number of workers that are called at the same time."""


class WorkerInventory:
    """Reads the state of all registered workers, drains workers and sets their roles.

    It keeps an open channel to each registered worker until `close`."""

    def __init__(self, registry: WorkerRegistry, trust: PeerAuth, config: Config) -> None:
        self._registry = registry
        self._trust = trust
        self._engine = config.engine
        self._worker = config.worker
        self._channels: dict[WorkerRef, tuple[grpc.aio.Channel, WorkerStub]] = {}

    async def look(self) -> tuple[WorkerState, ...]:
        """Return the state of all registered workers of all models, in the registry's order.

        Each worker is called for its state; one that does not answer within `ANSWER_S` seconds is returned with a
        `problem`. Raises StoreUnavailable when the registry does not answer."""
        records = await self._registry.list()
        await self._close({*self._channels} - {record.worker for record in records})
        at_once = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        return tuple(await asyncio.gather(*(self._describe(record, at_once) for record in records)))

    async def drain(self, workers: Sequence[WorkerState]) -> dict[WorkerRef, int | None]:
        """Request `workers` to drain, without waiting until they have, and return the number of jobs and leases left on
        each.

        The number is None for a worker that did not answer. For a worker that drains already, a further call returns
        the number that is left by then."""
        return dict(zip((w.ref for w in workers), await asyncio.gather(*map(self._drain, workers)), strict=True))

    async def set_role(self, worker: WorkerState, role: str) -> bool:
        """Record in the registry that routers are to use the worker `worker` in the role `role`.

        Returns False if this incarnation of the worker is not registered any more. Raises StoreUnavailable when the
        registry does not answer."""
        return await self._registry.set_role(worker.ref, role)

    async def close(self) -> None:
        await self._close({*self._channels})
        await self._registry.close()

    async def _describe(self, record: WorkerRecord, at_once: asyncio.Semaphore) -> WorkerState:
        known = WorkerState(ref=record.worker, model=record.model, pool=record.pool, role=record.effective_role)
        try:
            async with at_once:
                reply = await self._stub(record.worker).Describe(worker_pb2.DescribeRequest(), timeout=ANSWER_S)
            load = decode_load(reply.load)
            return replace(
                known, load=load, capability=self._capacity(reply, load), hosts=self._hosts(record.worker, reply)
            )
        except grpc.aio.AioRpcError as error:
            return replace(known, problem=reason_of(error))
        except TandemError as error:
            return replace(known, problem=error.message)

    async def _drain(self, worker: WorkerState) -> int | None:
        try:
            reply = await self._stub(worker.ref).Drain(worker_pb2.DrainRequest(timeout_ms=0), timeout=ANSWER_S)
        except (grpc.aio.AioRpcError, TandemError):
            return None
        return int(reply.num_left)

    @staticmethod
    def _hosts(worker: WorkerRef, reply: worker_pb2.DescribeReply) -> tuple[str, ...]:
        """Return the hosts of the ranks' machines, each once, the first rank's first."""
        own = host_of(worker.address)
        return tuple(dict.fromkeys((own, *(rank.host or own for rank in reply.transport.ranks))))

    def _capacity(self, reply: worker_pb2.DescribeReply, load: WorkerLoad) -> WorkerCapacity | None:
        cost = decode_step_cost(reply.step_cost) if reply.HasField("step_cost") else None
        engine = replace(self._engine, max_num_seqs=reply.max_num_seqs or self._engine.max_num_seqs)
        return capacity_of(cost, load, reply.transport.layout.block_size, engine, self._worker)

    def _stub(self, worker: WorkerRef) -> WorkerStub:
        if worker not in self._channels:
            channel = self._trust.open_channel(worker.address)
            self._channels[worker] = channel, self._trust.stub(channel, worker.incarnation)
        return self._channels[worker][1]

    async def _close(self, gone: set[WorkerRef]) -> None:
        for worker in gone:
            channel, _ = self._channels.pop(worker)
            await channel.close(None)
