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
from tandem.transfer.transfer_thread import TransferThread
from tandem.worker.model.transport_factory import open_transport
from tandem.worker.model.worker_model import WorkerModel
from tandem.worker.ranks.rank_group import RankGroup
from tandem.worker.ranks.remote_transfer import RemoteTransfer, TransferServer

STOP_S = 2.0
"""Seconds for the reads of a rank whose first rank has ended. A read over TCP that is cut off may end its source
too."""

OnEvent = Callable[[Event], None]


class RankTransferAgent:
    """Own the transfer agent of a rank other than the first, which executes the first rank's commands.

    Called by one thread; events go to `send`, on other threads.
    """

    def __init__(self, kind: str, cache: KVCache, rank: int, send: Callable[[bytes], None]) -> None:
        self._kind = kind
        self._cache = cache
        self._rank = rank
        self._send = send
        self._service: TransferServer | None = None

    def open(self, worker: WorkerRef) -> TransportPeer:
        """Open the transport of this rank, once; returns how other workers read this rank. Raises TandemError."""
        assert self._service is None, "an agent is opened once"
        pool = MemoryPool(self._cache.region, self._cache.layout, keepalive=self._cache)
        transport = open_transport(self._kind, pool, agent_name(worker.id, worker.incarnation, self._rank))
        digest = self._cache.digest_here
        self._service = TransferServer(
            lambda on_event: TransferThread(transport, digest, on_event, SystemClock()), self._send
        )
        self._service.start()
        return transport.describe(worker)

    def handle(self, data: bytes) -> None:
        """Execute one encoded command. Raises ValueError before `open`."""
        if self._service is None:
            raise ValueError("the transfer agent is not open")
        self._service.handle(data)

    def close(self) -> None:
        """Stop the agent after its open reads, waiting at most `STOP_S`."""
        if self._service is not None:
            self._service.stop(STOP_S)


def open_transfer(transport: Transport, model: WorkerModel, on_event: OnEvent, clock: Clock) -> KVTransfer:
    """Create the transfer of a worker over the first rank's transport, merging all ranks; the caller starts it."""

    def own(handler: OnEvent) -> TransferThread:
        return TransferThread(transport, model.digest, handler, clock)

    return own(on_event) if model.rank_group is None else _join(model.rank_group, own, on_event)


def _join(rank_group: RankGroup, own: Callable[[OnEvent], TransferThread], on_event: OnEvent) -> MultiRankTransfer:
    remotes: dict[int, RemoteTransfer] = {}

    def remote(rank: int, handler: OnEvent) -> RemoteTransfer:
        remotes[rank] = RemoteTransfer(partial(rank_group.send_to_transfer, rank), handler)
        return remotes[rank]

    merged = MultiRankTransfer([own, *(partial(remote, rank) for rank in rank_group.ranks)], on_event)

    def lose(reason: str) -> None:
        for transfer in remotes.values():
            transfer.lost(reason)

    rank_group.on_transfer_data(lambda rank, data: remotes[rank].received(data))
    rank_group.watch(lose)
    return merged
