"""The transfer agents of a worker's ranks: one rank's own, and all of them as one mover; never knows of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tandem.core.clock import Clock, SystemClock
from tandem.core.ids import WorkerRef
from tandem.engine.ports import TransportPeer
from tandem.engine.transfer_messages import Event
from tandem.runtime.kv_cache import KVCache
from tandem.transfer.interfaces import KVTransfer
from tandem.transfer.memory_pool import MemoryPool, agent_name
from tandem.transfer.multi_rank_transfer import MultiRankTransfer
from tandem.transfer.transfer_thread import TransferThread
from tandem.transfer.transport import Transport
from tandem.worker.model.transport_factory import open_transport
from tandem.worker.model.worker_model import WorkerModel
from tandem.worker.ranks.rank_group import RankGroup
from tandem.worker.ranks.remote_transfer import RemoteTransfer, TransferServer

STOP_S = 2.0
"""For reads of a rank whose leader is gone; one that is cut off over TCP may take its source with it."""

OnEvent = Callable[[Event], None]


class RankTransferAgent:
    """Of a rank but the first, told what to do by that one. One thread; `send` takes what is said on others."""

    def __init__(self, kind: str, cache: KVCache, rank: int, send: Callable[[bytes], None]) -> None:
        self._kind = kind
        self._cache = cache
        self._rank = rank
        self._send = send
        self._service: TransferServer | None = None

    def open(self, worker: WorkerRef) -> TransportPeer:
        """As one of this life of a worker, once; yields how this rank is read. Raises TandemError."""
        assert self._service is None, "an agent is opened once"
        pool = MemoryPool.of(self._cache.region, self._cache.layout, keepalive=self._cache)
        transport = open_transport(self._kind, pool, agent_name(worker.id, worker.incarnation, self._rank))
        digest = self._cache.digest_here
        self._service = TransferServer(lambda hear: TransferThread(transport, digest, hear, SystemClock()), self._send)
        self._service.start()
        return transport.describe(worker)

    def handle(self, data: bytes) -> None:
        """Raises ValueError before it is open."""
        if self._service is None:
            raise ValueError("the transfer agent is not open")
        self._service.handle(data)

    def close(self) -> None:
        """Let its reads end, for a while."""
        if self._service is not None:
            self._service.stop(STOP_S)


def open_mover(transport: Transport, model: WorkerModel, on_event: OnEvent, clock: Clock) -> KVTransfer:
    """All ranks' agents as one, over the first one's transport. It is not started yet."""

    def own(hear: OnEvent) -> TransferThread:
        return TransferThread(transport, model.digest, hear, clock)

    return own(on_event) if model.rank_group is None else _join(model.rank_group, own, on_event)


def _join(rank_group: RankGroup, own: Callable[[OnEvent], TransferThread], on_event: OnEvent) -> MultiRankTransfer:
    remotes: dict[int, RemoteTransfer] = {}

    def remote(rank: int, hear: OnEvent) -> RemoteTransfer:
        remotes[rank] = RemoteTransfer(partial(rank_group.send_to_transfer, rank), hear)
        return remotes[rank]

    joined = MultiRankTransfer([own, *(partial(remote, rank) for rank in rank_group.ranks)], on_event)

    def lose(reason: str) -> None:
        for one in remotes.values():
            one.lost(reason)

    rank_group.on_mover(lambda rank, data: remotes[rank].received(data))
    rank_group.watch(lose)
    return joined
