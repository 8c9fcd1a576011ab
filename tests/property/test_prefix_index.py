"""The prefix index from pools to mirrors through a real Redis: whatever is lost on the way, in the end each mirror
holds exactly what the workers do."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tandem.core.ids import BlockHash, Incarnation, WorkerId, WorkerRef
from tandem.gateway.prefix.prefix_index_client import PrefixIndexClient
from tandem.kv.block_pool import BlockPool, BlockTable
from tandem.kv.hashing import chain_hashes, root_hash
from tandem.kv.kv_event_codec import DEVICE, short_hash
from tandem.kv.kv_event_log import KVEventLog
from tandem.stores.embedded_redis import EmbeddedServer
from tandem.stores.prefix_index import NUM_SHARDS, IndexReader, IndexWriter
from tandem.stores.redis_client import RedisClient
from tandem.worker.gateways.kv_event_publisher import KVEventPublisher
from tests.effort import effort

ROOT = root_hash("model", 1, "")
MAX_LENGTH = 12
CHAINS = {
    (branch, shared): chain_hashes(ROOT, [*range(shared), *[50 + branch] * (MAX_LENGTH - shared)], 1)
    for branch in range(4)
    for shared in range(MAX_LENGTH)
}
PLACES = {block: place for chain in CHAINS.values() for place, block in enumerate(chain, 1)}
NUM_WORKERS = 3
WORKERS = st.integers(0, NUM_WORKERS - 1)
T = TypeVar("T")


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


class Life:
    """One life of a worker: its pool and what tells of it."""

    def __init__(self, url: str, number: int, incarnation: int, stride: int, clock: Clock) -> None:
        self.ref = WorkerRef(WorkerId(f"w{number}"), Incarnation(incarnation), f"host:{number}")
        self.pool = BlockPool(16, 1, records_facts=True)
        self.stride = stride
        writer = IndexWriter(url, "tandem", self.ref)
        self.publisher = KVEventPublisher(writer, self.ref, KVEventLog(stride, 16, 24), 16 // stride, clock)
        self.close = writer.close

    def serve(self, hashes: list[BlockHash]) -> None:
        table = BlockTable()
        self.pool.share(table, hashes)
        if self.pool.grow(table, len(hashes)):
            self.pool.publish(table, hashes)
        self.pool.release(table)
        self.publisher.on_kv_events(self.pool.take_events())

    def due(self) -> set[int]:
        return {short_hash(h) | DEVICE for h in self.pool._index.all() if PLACES[h] % self.stride == 0}


class Fleet:
    """Who lives, for gateways."""

    def __init__(self) -> None:
        self.lives: dict[int, Life] = {}

    def workers(self) -> list[WorkerRef]:
        return [life.ref for life in self.lives.values()]

    def cache_root(self, model: str) -> tuple[str, int] | None:
        return "model", 1


class IndexMachine(RuleBasedStateMachine):
    @initialize(stride=st.sampled_from([1, 1, 2, 3]))
    def start(self, stride: int) -> None:
        self.loop = asyncio.new_event_loop()
        # A server that comes back has another socket: clients know it by a link.
        self.place = tempfile.TemporaryDirectory(prefix="tandem-")
        self.link = Path(self.place.name) / "redis.sock"
        self.url = f"unix://{self.link}"
        self.clock, self.fleet, self.stride, self.incarnation = Clock(), Fleet(), stride, 0
        self.server: EmbeddedServer | None = None
        self.gateways: list[PrefixIndexClient] = []
        self.redis = RedisClient(self.url).redis
        self.restart_server()
        self.new_gateway()
        for number in range(NUM_WORKERS):
            self.begin_life(number)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    # ---- the cluster at work

    @rule(prompts=st.lists(st.tuples(WORKERS, st.sampled_from(sorted(CHAINS)), st.integers(1, MAX_LENGTH)), max_size=9))
    def serve(self, prompts: list[tuple[int, tuple[int, int], int]]) -> None:
        for number, chain, length in prompts:
            if number in self.fleet.lives:
                self.fleet.lives[number].serve(CHAINS[chain][:length])

    @rule()
    def publish(self) -> None:
        for life in self.fleet.lives.values():
            self.run(life.publisher.turn())

    @rule()
    def follow(self) -> None:
        for gateway in self.gateways:
            self.run(gateway.follow())

    @rule(seconds=st.sampled_from([0.1, 0.3, 60.0]))
    def wait(self, seconds: float) -> None:
        self.clock.time += seconds

    # ---- what goes wrong

    @rule(number=WORKERS)
    def begin_life(self, number: int) -> None:
        """A worker restarts; nothing retracts the events that its earlier incarnation published."""
        self.leave(number)
        self.incarnation += 1
        self.fleet.lives[number] = Life(self.url, number, self.incarnation, self.stride, self.clock)

    @precondition(lambda self: len(self.fleet.lives) == NUM_WORKERS)
    @rule(number=WORKERS)
    def leave(self, number: int) -> None:
        if number in self.fleet.lives:
            self.run(self.fleet.lives.pop(number).close())

    @precondition(lambda self: len(self.gateways) < 3)
    @rule()
    def new_gateway(self) -> None:
        reader = IndexReader(self.url, "tandem")
        self.gateways.append(PrefixIndexClient(reader, self.fleet, self.stride, self.clock))

    @precondition(lambda self: self.server)
    @rule(what=st.sampled_from(["entries", "snapshots", "all"]), left=st.sampled_from([0, 0, 1]))
    def lose(self, what: str, left: int) -> None:
        """The store loses the events that all workers have just published, before any gateway has read them."""
        self.publish()
        if what == "all":
            self.run(self.redis.flushall())
        elif what == "snapshots":
            for number in range(NUM_WORKERS):
                self.run(self.redis.delete(f"{{tandem:index:w:w{number}}}:blocks"))
        else:
            for shard in range(NUM_SHARDS):
                self.run(self.redis.xtrim(f"{{tandem:index:{shard}}}", maxlen=left, approximate=False))

    @precondition(lambda self: self.server)
    @rule()
    def go_away(self) -> None:
        assert self.server is not None
        self.server.stop()
        self.server = None

    @precondition(lambda self: not self.server)
    @rule()
    def restart_server(self) -> None:
        self.server = EmbeddedServer.start()
        self.link.unlink(missing_ok=True)
        self.link.symlink_to(self.server.url.removeprefix("unix://"))

    # ---- the end

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self.settle()
        finally:
            for closing in (*(g.stop() for g in self.gateways), *(v.close() for v in self.fleet.lives.values())):
                self.run(closing)
            self.run(self.redis.aclose())
            if self.server is not None:
                self.server.stop()
            self.place.cleanup()
            self.loop.close()

    def settle(self) -> None:
        """Nothing goes wrong any more, and nothing is done."""
        if self.server is None:
            self.restart_server()
        for _ in range(5):
            for life in self.fleet.lives.values():
                self.run(life.publisher.turn())
            for gateway in self.gateways:
                while self.run(gateway.follow()):
                    pass
            self.clock.time += 1.0
        for gateway in self.gateways:
            table = gateway.table
            assert gateway.num_unloaded_workers == 0, gateway
            assert table.num_workers == len(self.fleet.lives), gateway
            for life in self.fleet.lives.values():
                held = table.held(life.ref)
                assert held is not None and set(held) == life.due(), (gateway, life.publisher)
                held.check()


IndexMachine.TestCase.settings = effort(14, steps=40)
TestIndexMachine = pytest.mark.redis(IndexMachine.TestCase)
