"""Open the KV transfer agents of a worker's ranks: the agent of one rank, or all of them merged into one
`KVTransfer`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tandem.core.clock import Clock, SystemClock
from tandem.core.ids import WorkerRef
from tandem.engine.transfer_messages import Event, TransportPeer
from tandem.runtime.kv_cache import KVCache
from tandem.transfer.interface import KVTransfer, Transport
from tandem.transfer.memory_pool import MemoryPool, agent_name
from tandem.transfer.multi_rank_transfer import MultiRankTransfer
from tandem.transfer.nixl_transport import NixlTransport
from tandem.transfer.process_vm_transport import ProcessVmTransport
from tandem.transfer.transfer_thread import TransferThread
from tandem.worker.model.worker_model import WorkerModel
from tandem.worker.ranks.remote_transfer import RemoteTransfer

OnEvent = Callable[[Event], None]
OpenTransport = Callable[[str, MemoryPool, str], Transport]
"""Signature of a transport factory: `open(kind, pool, agent)` opens a transport of that kind ("nixl" or "local") for
the pool, under the agent's name."""


def open_transport(kind: str, pool: MemoryPool, agent: str) -> Transport:
    """Open a transport for `pool` under the name `agent`: over NIXL for the kind "nixl", by `process_vm_readv` for any
    other. Raises TandemError when this machine does not support it."""
    return NixlTransport(pool, agent) if kind == "nixl" else ProcessVmTransport(pool, agent)


def open_rank_transfer(
    kind: str, cache: KVCache, rank: int, on_event: OnEvent, worker: WorkerRef
) -> tuple[KVTransfer, TransportPeer]:
    """Open the KV transfer of a rank other than the first, for the memory in `cache`.

    Returns the transfer, already started, which executes the first rank's commands, and the description by which other
    workers read this rank. `kind`: "nixl" or "local". `on_event`: receives the transfer's events. `worker`: the worker
    of the rank. Raises TandemError when this machine does not support the transport.
    """
    pool = MemoryPool(cache.region, cache.layout, keepalive=cache)
    transport = open_transport(kind, pool, agent_name(worker.id, worker.incarnation, rank))
    transfer = TransferThread(transport, cache.digest_here, on_event, SystemClock())
    transfer.start()
    return transfer, transport.describe(worker)


def open_transfer(transport: Transport, model: WorkerModel, on_event: OnEvent, clock: Clock) -> KVTransfer:
    """Create the KV transfer of a worker from the first rank's `transport`; the caller starts it.

    It is merged with the transfers of the other ranks if there are any. `on_event` receives its events.
    """

    def own(handler: OnEvent) -> TransferThread:
        return TransferThread(transport, model.digest, handler, clock)

    rank_group = model.rank_group
    if rank_group is None:
        return own(on_event)
    remotes: dict[int, RemoteTransfer] = {}

    def remote(rank: int, handler: OnEvent) -> RemoteTransfer:
        remotes[rank] = RemoteTransfer(partial(rank_group.send_to_transfer, rank), handler)
        return remotes[rank]

    def lose(reason: str) -> None:
        for transfer in remotes.values():
            transfer.lost(reason)

    merged = MultiRankTransfer([own, *(partial(remote, rank) for rank in rank_group.ranks)], on_event)
    rank_group.on_transfer_event(lambda rank, event: remotes[rank].received(event))
    rank_group.watch(lose)
    return merged
