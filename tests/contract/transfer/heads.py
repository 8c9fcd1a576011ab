"""Producers and consumers of several ranks, for the transport contract: pools that share the heads of known content;
asserts nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import UnionType

import numpy as np
import torch

from tandem.core.clock import SystemClock
from tandem.core.ids import BlockId, Incarnation, WorkerId
from tandem.engine.effects import StartRead
from tandem.engine.transfer_messages import Event, TransportPeer
from tandem.kv.handoff import BlockDigest
from tandem.kv.layout import KVGroup, KVLayout
from tandem.transfer.memory_pool import agent_name
from tandem.transfer.peer_layout import join_ranks
from tandem.transfer.transfer_engine import TransferEngine
from tandem_kernels.reference import block_digest
from tests.contract.transfer.conftest import Rig, handshake_of, spawn_rank
from tests.contract.transfer.peer_process import NUM_BLOCKS, TRANSPORTS, Bytes, known_content
from tests.memory_pools import memory_pool

HEADS = 4
MAX_POST_BYTES = 1 << 16
REMOTE, LOCAL = [7, 8, 9, 200, 0, 41, 40], [3, 4, 5, 255, 0, 40, 41]
"""Blocks of theirs and of ours: neighbours, a lone one at the end of our pool, and two that cross."""
SEED = 3


def layout_of(dtype: str) -> KVLayout:
    return KVLayout(16, (KVGroup(2, HEADS, 16, dtype),))


def digests_of(content: Bytes, heads: range, blocks: Sequence[int], logical: Sequence[int]) -> list[tuple[int, ...]]:
    """By the reference kernel, of memory `[num_blocks, bytes of these heads]`."""
    pool = torch.from_numpy(content).view(len(content), len(heads), 1, 1, -1)
    words = block_digest(pool, torch.tensor(blocks), torch.tensor(logical), head_start=heads.start)
    return [tuple(row) for row in words.numpy().view(np.uint64).tolist()]


class ConsumerRank:
    """One rank of a consumer without its threads."""

    def __init__(self, kind: str, layout: KVLayout, rank: int, num_ranks: int) -> None:
        share = HEADS // num_ranks
        self.memory = np.zeros((NUM_BLOCKS, share * layout.head_bytes), np.uint8)
        address, start = self.memory.ctypes.data, rank * share
        pool = memory_pool(address, NUM_BLOCKS, layout, heads=range(start, start + share), keepalive=self.memory)
        agent = agent_name(WorkerId(f"consumer-of-{num_ranks}"), Incarnation(1), rank)
        self.heads = pool.heads
        self.transport = TRANSPORTS[kind](pool, agent)
        self.carrier = TransferEngine(self.transport, self.digest, SystemClock(), MAX_POST_BYTES)

    def digest(self, blocks: Sequence[BlockId], logical: Sequence[int]) -> list[tuple[int, ...]]:
        return digests_of(self.memory, self.heads, blocks, logical)

    def until(self, *kinds: type[Event]) -> list[Event]:
        return turn_until(self.carrier, *kinds)


def turn_until(carrier: TransferEngine, *kinds: type[Event] | UnionType) -> list[Event]:
    """Turn until each of these has come; returns all events."""
    events: list[Event] = []

    def turn() -> list[Event]:
        events.extend(carrier.turn())
        return events

    return Rig.until(turn, lambda seen: all(any(isinstance(event, kind) for event in seen) for kind in kinds))


@dataclass
class World:
    """Producers, each rank in its process and on `device`, and consumers, for one transport and one type of numbers."""

    kind: str
    layout: KVLayout
    stack: ExitStack
    device: str = "cpu"
    producers: dict[int, TransportPeer] = field(default_factory=dict)
    consumers: dict[int, list[ConsumerRank]] = field(default_factory=dict)

    def producer(self, num_ranks: int) -> TransportPeer:
        if num_ranks not in self.producers:
            self.producers[num_ranks], _ = self.spawn(f"producer-of-{num_ranks}", num_ranks)
        return self.producers[num_ranks]

    def spawn(self, name: str, num_ranks: int) -> tuple[TransportPeer, list[subprocess.Popen[str]]]:
        processes = [
            spawn_rank(self.kind, name, 1, SEED, self.layout, rank, num_ranks, self.device) for rank in range(num_ranks)
        ]
        for process in processes:
            self.stack.callback(process.communicate)
            self.stack.callback(process.kill)
        return join_ranks([handshake_of(process) for process in processes]), processes

    def consumer(self, num_ranks: int) -> list[ConsumerRank]:
        if num_ranks not in self.consumers:
            ranks = [ConsumerRank(self.kind, self.layout, rank, num_ranks) for rank in range(num_ranks)]
            for rank in ranks:
                self.stack.callback(rank.carrier.close)
            self.consumers[num_ranks] = ranks
        for rank in self.consumers[num_ranks]:
            rank.memory[:] = 0xEE
        return self.consumers[num_ranks]

    def order(self, id: int, peer: TransportPeer) -> StartRead:
        """With the digests that a producer of one rank would offer."""
        positions = tuple(range(5, 5 + len(REMOTE)))
        digests = digests_of(known_content(SEED, self.layout), range(HEADS), REMOTE, positions)
        offered = tuple(map(BlockDigest, map(BlockId, REMOTE), digests))
        return StartRead(id, peer.worker, positions, offered, tuple(map(BlockId, LOCAL)))
