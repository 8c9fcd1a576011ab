"""A transport whose reads end when a test decides, and read orders for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tandem.core.ids import BlockId, Incarnation, WorkerId, WorkerRef
from tandem.engine.effects import StartRead
from tandem.engine.transfer_messages import TransportPeer, TransportRank
from tandem.kv.handoff import BlockDigest
from tandem.kv.layout import KVGroup, KVLayout, KVRegion
from tandem.transfer.interface import BlockCopy, PeerError, PostedRead, ReadState
from tandem.transfer.memory_pool import MemoryPool
from tests.memory_pools import memory_pool

LAYOUT = KVLayout(16, (KVGroup(1, 1, 8, "float32"),))
BLOCK_BYTES = LAYOUT.block_bytes


def peer_named(name: str, incarnation: int = 1) -> TransportPeer:
    region = KVRegion(4096, 100, BLOCK_BYTES, 0, 1)
    worker = WorkerRef(WorkerId(name), Incarnation(incarnation), "127.0.0.1:1")
    return TransportPeer(worker, LAYOUT, (TransportRank(f"{name}.{incarnation}", b"", region),))


P = peer_named("p")
Q = peer_named("q")


def order(id: int, num_blocks: int = 1, peer: TransportPeer = P, digests: bool = False) -> StartRead:
    local = tuple(BlockId(10 * id + i) for i in range(num_blocks))
    offered = tuple(BlockDigest(BlockId(i), digest_of(block, i)) for i, block in enumerate(local))
    return StartRead(id, peer.worker, tuple(range(num_blocks)), offered, local, digests)


def copies_of(read: StartRead) -> tuple[BlockCopy, ...]:
    return tuple(map(BlockCopy, (offered.block for offered in read.offered), read.local))


def with_digests(read: StartRead, digests: Sequence[tuple[int, ...]]) -> StartRead:
    return replace(read, offered=tuple(map(replace_heads, read.offered, digests)))


def replace_heads(offered: BlockDigest, heads: tuple[int, ...]) -> BlockDigest:
    return BlockDigest(offered.block, heads)


def digest_of(block: int, logical: int) -> tuple[int, ...]:
    return (block * 1000 + logical,)


def digest(blocks: Sequence[BlockId], logical: Sequence[int]) -> list[tuple[int, ...]]:
    return [digest_of(b, n) for b, n in zip(blocks, logical, strict=True)]


class ManualClock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


@dataclass(frozen=True, eq=False)
class ScriptedRead:
    """A read of a scripted transport, with the number by which the test ends it; 0 for a self-test."""

    transport: ScriptedTransport
    number: int

    def poll(self) -> ReadState:
        if not self.number:
            return self.transport.test_state
        end = self.transport.ended.pop(self.number, None)
        if isinstance(end, PeerError):
            raise end
        return end or ReadState.PENDING


@dataclass
class ScriptedTransport:
    """Reads stay PENDING until a test ends them. `open` holds what may still write to memory, by number of the read."""

    open: dict[int, tuple[tuple[str, int], tuple[BlockCopy, ...]]] = field(default_factory=dict)
    ended: dict[int, ReadState | PeerError] = field(default_factory=dict)
    posted: list[tuple[BlockCopy, ...]] = field(default_factory=list)
    post_error: PeerError | None = None
    connect_error: PeerError | None = None
    close_error: Exception | None = None
    test_state: ReadState = ReadState.DONE
    num_reads: int = 0
    disconnected: list[tuple[str, int]] = field(default_factory=list)
    num_progress: int = 0
    on_post: Callable[[], None] = lambda: None
    pool: MemoryPool = field(default_factory=lambda: memory_pool(4096, 100, LAYOUT))

    def describe(self, worker: WorkerRef) -> TransportPeer:
        return peer_named(worker.id, worker.incarnation)

    def connect(self, peer: TransportPeer) -> None:
        if self.connect_error:
            raise self.connect_error

    def disconnect(self, peer: TransportPeer) -> bool:
        self.disconnected.append(peer.life)
        return not any(life == peer.life for life, _ in self.open.values())

    def post_read(self, peer: TransportPeer, copies: Sequence[BlockCopy]) -> PostedRead:
        self.on_post()
        if self.post_error:
            raise self.post_error
        self.num_reads += 1
        self.open[self.num_reads] = (peer.life, tuple(copies))
        self.posted.append(tuple(copies))
        return ScriptedRead(self, self.num_reads)

    def progress(self) -> None:
        self.num_progress += 1

    def enter_thread(self) -> None:
        """Scripts run in any."""

    def post_self_test(self) -> PostedRead:
        if self.post_error:
            raise self.post_error
        return ScriptedRead(self, 0)

    def close(self) -> None:
        if self.close_error:
            raise self.close_error
        self.open.clear()

    def end(self, number: int, state: ReadState = ReadState.DONE) -> None:
        del self.open[number]
        self.ended[number] = state

    def lose_track(self, number: int) -> None:
        """End a read with an error that leaves it uncertain: it may still write."""
        self.ended[number] = PeerError("in doubt")
