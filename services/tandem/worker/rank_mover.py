"""The transfer agents of a worker's ranks: one rank's own, and all of them as one mover; never knows of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tandem.core.clock import Clock, SystemClock
from tandem.core.ids import WorkerRef
from tandem.engine.orders import Event
from tandem.engine.ports import TransportPeer
from tandem.runtime.cache import KVCache
from tandem.transfer.joined import JoinedMover
from tandem.transfer.mover import Mover
from tandem.transfer.pool import MemoryPool, agent_name
from tandem.transfer.transport import Transport
from tandem.transfer.verbs import Verbs
from tandem.worker.crew import Crew
from tandem.worker.model import WorkerModel
from tandem.worker.remote_mover import MoverService, RemoteMover
from tandem.worker.transports import open_transport

STOP_S = 2.0
"""For reads of a rank whose leader is gone; one that is cut off over TCP may take its source with it."""

OnEvent = Callable[[Event], None]


class RankAgent:
    """Of a rank but the first, told what to do by that one. One thread; `send` takes what is said on others."""

    def __init__(self, kind: str, cache: KVCache, rank: int, send: Callable[[bytes], None]) -> None:
        self._kind = kind
        self._cache = cache
        self._rank = rank
        self._send = send
        self._service: MoverService | None = None

    def open(self, worker: WorkerRef) -> TransportPeer:
        """As one of this life of a worker, once; yields how this rank is read. Raises TandemError."""
        assert self._service is None, "an agent is opened once"
        pool = MemoryPool.of(self._cache.region, self._cache.layout, keepalive=self._cache)
        transport = open_transport(self._kind, pool, agent_name(worker.id, worker.incarnation, self._rank))
        digest = self._cache.digest_here
        self._service = MoverService(lambda hear: Mover(transport, digest, hear, SystemClock()), self._send)
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


def open_mover(transport: Transport, model: WorkerModel, on_event: OnEvent, clock: Clock) -> Verbs:
    """All ranks' agents as one, over the first one's transport. It is not started yet."""

    def own(hear: OnEvent) -> Mover:
        return Mover(transport, model.digest, hear, clock)

    return own(on_event) if model.crew is None else _join(model.crew, own, on_event)


def _join(crew: Crew, own: Callable[[OnEvent], Mover], on_event: OnEvent) -> JoinedMover:
    remotes: dict[int, RemoteMover] = {}

    def remote(rank: int, hear: OnEvent) -> RemoteMover:
        remotes[rank] = RemoteMover(partial(crew.tell_mover, rank), hear)
        return remotes[rank]

    joined = JoinedMover([own, *(partial(remote, rank) for rank in crew.ranks)], on_event)

    def lose(reason: str) -> None:
        for one in remotes.values():
            one.lost(reason)

    crew.on_mover(lambda rank, data: remotes[rank].received(data))
    crew.watch(lose)
    return joined
