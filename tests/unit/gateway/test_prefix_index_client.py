"""Test a gateway's prefix mirror beside publishers and a real Redis, one fault at a time: lost facts are recovered,
dead workers stay removed, and no snapshot is requested where nothing was lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from tandem.core.events import BlockEvicted, BlockStored, KVFact
from tandem.core.ids import BlockHash, Incarnation, WorkerId, WorkerRef
from tandem.gateway.prefix.prefix_index_client import PrefixIndexClient
from tandem.kv.kv_event_codec import DEVICE, short_hash
from tandem.kv.kv_event_log import KVEventLog
from tandem.routing.prefix_accuracy import Prediction
from tandem.stores.prefix_index import MAX_FACTS, IndexReader, IndexWriter, shard_of
from tandem.stores.redis_client import RedisClient, StoreUnavailable
from tandem.worker.gateways.kv_event_publisher import BEACON_S, KVEventPublisher

pytestmark = pytest.mark.redis
BLOCKS = [BlockHash(number.to_bytes(2, "big") * 8) for number in range(300)]
SOON_S = 0.5
"""A delay longer than any second look at a snapshot or a snapshot request, and shorter than the beacon interval."""


class Cluster:
    """Own one worker, in successive incarnations, and one gateway."""

    def __init__(self, url: str, namespace: str) -> None:
        self.url, self.namespace, self.time = url, namespace, 1000.0
        self.redis = RedisClient(url).redis
        self.writers: list[IndexWriter] = []
        self.gateway = PrefixIndexClient(IndexReader(url, namespace), self, 1, self)
        self.begin_life()

    def now(self) -> float:
        return self.time

    def workers(self) -> list[WorkerRef]:
        return [self.ref]

    def cache_root(self, model: str) -> tuple[str, int] | None:
        return "model", 1

    def begin_life(self) -> None:
        self.ref = WorkerRef(WorkerId("w"), Incarnation(len(self.writers) + 1), "host:1")
        self.writers.append(IndexWriter(self.url, self.namespace, self.ref))
        self.publisher = KVEventPublisher(self.writers[-1], self.ref, KVEventLog(1, 300, 600), 300, self)

    async def publish(self, stored: Sequence[BlockHash] = (), evicted: Sequence[BlockHash] = ()) -> None:
        facts: list[KVFact] = [*(BlockStored(h, None) for h in stored), *(BlockEvicted(h) for h in evicted)]
        self.publisher.on_kv_events(facts)
        await self.publisher.turn()

    async def pass_by(self, seconds: float) -> None:
        self.time += seconds
        await self.publisher.turn()
        await self.gateway.follow()

    def held(self) -> set[int]:
        return set(self.gateway.table.held(self.ref) or ())

    def num_requested(self) -> float:
        return self.gateway.num_unloaded_workers

    async def close(self) -> None:
        await self.gateway.stop()
        for writer in self.writers:
            await writer.close()
        await self.redis.aclose()


@pytest.fixture
async def cluster(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    cluster = Cluster(redis_url, f"prefixes-{request.node.name}")
    yield cluster
    await cluster.close()


def words(blocks: Sequence[BlockHash]) -> set[int]:
    return {short_hash(block) | DEVICE for block in blocks}


async def test_published_facts_are_read_at_the_next_poll_without_a_snapshot(cluster: Cluster) -> None:
    """A snapshot that repairs a loss would hide the loss from the test."""
    await cluster.pass_by(SOON_S)
    held: list[BlockHash] = []
    for start in range(0, 40, 5):
        gone, held = held[:2], held[2:] + BLOCKS[start : start + 5]
        await cluster.publish(BLOCKS[start : start + 3], evicted=gone)
        await cluster.publish(BLOCKS[start + 3 : start + 5])
        await cluster.gateway.follow()
        assert cluster.held() == words(held) and not cluster.num_requested(), start


async def test_facts_split_over_several_entries_are_complete(cluster: Cluster) -> None:
    await cluster.pass_by(SOON_S)
    assert len(BLOCKS) > 2 * MAX_FACTS
    await cluster.publish(BLOCKS)
    await cluster.gateway.follow()
    assert cluster.held() == words(BLOCKS) and not cluster.num_requested()


@pytest.mark.parametrize("is_all_lost", [False, True])
async def test_the_last_entry_is_missed_though_nothing_follows_on_it(cluster: Cluster, is_all_lost: bool) -> None:
    await cluster.publish(BLOCKS[:3])
    await cluster.pass_by(SOON_S)
    await cluster.publish(BLOCKS[3:5], evicted=BLOCKS[:1])
    stream = f"{{{cluster.namespace}:index:{shard_of(cluster.ref.id)}}}"
    last, _ = (await cluster.redis.xrevrange(stream, count=1))[0]
    await (cluster.redis.delete(stream) if is_all_lost else cluster.redis.xdel(stream, last))
    await cluster.pass_by(SOON_S)
    assert cluster.held() == words(BLOCKS[:3]), "nobody can know yet"
    for _ in range(4):
        await cluster.pass_by(BEACON_S)
    assert cluster.held() == words(BLOCKS[1:5]) and not cluster.num_requested()


async def test_facts_that_a_worker_drops_while_redis_is_away_are_in_a_snapshot(cluster: Cluster) -> None:
    await cluster.publish(BLOCKS[:1])
    await cluster.pass_by(SOON_S)
    for _ in range(301):
        cluster.publisher.on_kv_events([BlockStored(BLOCKS[2], None), BlockEvicted(BLOCKS[2])])
    await cluster.publish(BLOCKS[5:6])
    for _ in range(3):
        await cluster.pass_by(BEACON_S)
    assert cluster.held() == words([BLOCKS[0], BLOCKS[5]]) and not cluster.num_requested()


async def test_a_snapshot_of_the_previous_incarnation_is_ignored(cluster: Cluster) -> None:
    await cluster.publish(BLOCKS[:9])
    await cluster.pass_by(SOON_S)
    assert cluster.held() == words(BLOCKS[:9])
    dead = cluster.ref
    cluster.begin_life()
    cluster.time += SOON_S
    await cluster.gateway.follow()
    assert cluster.held() == set() and cluster.gateway.table.held(dead) is None
    await cluster.publish(BLOCKS[9:11])
    for _ in range(3):
        await cluster.pass_by(SOON_S)
    assert cluster.held() == words(BLOCKS[9:11]) and not cluster.num_requested()
    assert cluster.gateway.table.num_workers == 1


async def test_blocks_missing_at_a_fetch_source_count_as_stale_hits_of_the_source(cluster: Cluster) -> None:
    other = WorkerRef(WorkerId("other"), Incarnation(1), "host:2")
    cluster.gateway.reported(Prediction(cluster.ref, 10, 1), 10)
    cluster.gateway.reported(Prediction(other, 20, 1, num_before=10), 10)
    assert cluster.gateway.false_hits.num_missed == 20


@pytest.mark.parametrize("is_seen", [False, True])
async def test_an_older_snapshot_restored_with_redis_is_replaced(cluster: Cluster, is_seen: bool) -> None:
    """A restart from a file or a failover to a lagging replica brings it back, noticed by the worker or not."""
    await cluster.publish(BLOCKS[:3])
    key = f"{{{cluster.namespace}:index:w:{cluster.ref.id}}}:blocks"
    older = await cluster.redis.get(key)
    await cluster.publish(BLOCKS[3:], evicted=BLOCKS[:1])
    cluster.publisher._covered = None
    await cluster.publisher.turn()
    assert older is not None and await cluster.redis.get(key) != older
    await cluster.redis.set(key, older, px=60_000)
    await cluster.redis.delete(f"{{{cluster.namespace}:index:{shard_of(cluster.ref.id)}}}")
    if is_seen:
        append = cluster.publisher._writer.append
        cluster.publisher._writer.append = lost  # type: ignore[method-assign]
        await cluster.pass_by(3.0)
        cluster.publisher._writer.append = append  # type: ignore[method-assign]
    for _ in range(30):
        await cluster.pass_by(1.0)
    assert cluster.held() == words(BLOCKS[1:]) and not cluster.num_requested()


async def lost(entries: object) -> None:
    raise StoreUnavailable("planted")
