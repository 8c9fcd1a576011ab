"""The KV of one executor as several ranks of it would hold it, with their transfer engines in one thread.

Nothing is computed. Each rank has a pool of its share of the heads, a transport and a carrier; code of the product
merges their events. What the executor has computed is laid out over the ranks when it is announced; what the ranks have
read is put together when it is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.core.clock import Clock
from tandem.core.ids import BlockId, WorkerRef
from tandem.engine.effects import StartRead
from tandem.engine.transfer_messages import Command, Connected, ConnectPeer, Event, ReadDone, TransportPeer
from tandem.kv.layout import KVLayout
from tandem.runtime.kv_cache import KVCache
from tandem.transfer.interface import Transport
from tandem.transfer.memory_pool import MemoryPool, agent_name
from tandem.transfer.multi_rank_transfer import RankEventMerger
from tandem.transfer.nixl_transport import NixlTransport
from tandem.transfer.peer_layout import join_ranks
from tandem.transfer.process_vm_transport import ProcessVmTransport
from tandem.transfer.transfer_engine import TransferEngine
from tandem_kernels.reference import pack_blocks, unpack_blocks


class Rank:
    """One rank's memory, and who reads into it."""

    def __init__(
        self, kind: str, worker: WorkerRef, layout: KVLayout, num_blocks: int, clock: Clock, rank: int, num_ranks: int
    ) -> None:
        share = layout.group.heads // num_ranks
        self.cache = KVCache(layout, num_blocks, heads=range(rank * share, (rank + 1) * share))
        memory = MemoryPool(self.cache.region, layout, keepalive=self.cache)
        agent = agent_name(worker.id, worker.incarnation, rank)
        self.transport: Transport = (ProcessVmTransport if kind == "local" else NixlTransport)(memory, agent)
        self.carrier = TransferEngine(self.transport, self.cache.digest, clock, 1 << 20)


class MultiRankCarrier:
    """What `TransferEngine` and `Transport` are to a node whose KV lies with several ranks."""

    def __init__(self, kind: str, worker: WorkerRef, whole: KVCache, clock: Clock, num_ranks: int) -> None:
        self._whole = whole
        self._ranks = [
            Rank(kind, worker, whole.layout, whole.num_blocks, clock, rank, num_ranks) for rank in range(num_ranks)
        ]
        self._joint = RankEventMerger(num_ranks)
        self._orders: dict[int, StartRead] = {}

    @property
    def has_ready_work(self) -> bool:
        return any(rank.carrier.has_ready_work for rank in self._ranks)

    @property
    def is_drained(self) -> bool:
        return all(rank.carrier.is_drained for rank in self._ranks)

    def describe(self, worker: WorkerRef) -> TransportPeer:
        return join_ranks([rank.transport.describe(worker) for rank in self._ranks])

    def progress(self) -> None:
        for rank in self._ranks:
            rank.transport.progress()

    def accept(self, command: Command) -> None:
        if isinstance(command, StartRead):
            self._orders[command.read] = command
        self._joint.submit(command)
        self._dispatch_commands()
        if isinstance(command, ConnectPeer):
            assert self.turn() == [Connected(command.peer)], "nodes order reads at once"

    def turn(self) -> list[Event]:
        for number, rank in enumerate(self._ranks):
            for event in rank.carrier.turn():
                self._joint.on_event(number, event)
        self._dispatch_commands()
        events = list(self._joint.events)
        self._joint.events.clear()
        for event in events:
            if isinstance(event, ReadDone):
                self._put_together(self._orders.pop(event.id).local)
        return events

    def close(self) -> None:
        for rank in self._ranks:
            rank.carrier.close()

    def lay_out(self, blocks: Sequence[BlockId]) -> None:
        """Give each rank its heads of blocks that the executor has computed."""
        ids = torch.tensor(blocks, dtype=torch.int64)
        for rank in self._ranks:
            start, stop = rank.transport.pool.heads.start, rank.transport.pool.heads.stop
            unpack_blocks(pack_blocks(self._whole.pool, ids, start, stop), rank.cache.pool, ids, 0)

    def _put_together(self, blocks: Sequence[BlockId]) -> None:
        ids = torch.tensor(blocks, dtype=torch.int64)
        for rank in self._ranks:
            heads = rank.transport.pool.heads
            unpack_blocks(pack_blocks(rank.cache.pool, ids, 0, len(heads)), self._whole.pool, ids, heads.start)

    def _dispatch_commands(self) -> None:
        while self._joint.commands:
            number, command = self._joint.commands.popleft()
            self._ranks[number].carrier.accept(command)
