"""Test the prefix index's binary format, and its writer and reader on a real server."""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncIterator

import pytest

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.kv.kv_event_log import KVEventBatch
from tandem.routing.kv_indexer import WorkerKVEvents
from tandem.stores import prefix_index
from tandem.stores.prefix_index import (
    NUM_SHARDS,
    IndexFormatError,
    IndexReader,
    IndexSnapshot,
    IndexWriter,
    pack_entry,
    pack_snapshot,
    shard_of,
    unpack_entry,
    unpack_snapshot,
)
from tandem.stores.redis_client import RedisClient, StoreUnavailable

WORKER = WorkerRef(WorkerId("wörker {1}"), Incarnation(2**63 + 5), "host:1")
SNAPSHOT = IndexSnapshot(WORKER.incarnation, 7, 100, array("Q", [5, 2**64 - 1]))


def entry(first: int, *words: int) -> WorkerKVEvents:
    return WorkerKVEvents(WORKER.id, WORKER.incarnation, KVEventBatch(first, array("Q", words)))


def test_the_binary_format_is_pinned() -> None:
    """Gateways and workers of different releases must agree on the format."""
    raw = pack_entry(WorkerKVEvents(WorkerId("w1"), Incarnation(3), KVEventBatch(258, array("Q", [6]))))
    assert raw.hex() == "01030000000000000002010000000000000277310600000000000000"
    raw = pack_snapshot(IndexSnapshot(Incarnation(3), 258, 9, array("Q", [6])))
    assert raw.hex() == "010300000000000000020100000000000009000000000000000600000000000000"
    assert shard_of(WorkerId("w1")) == 2 and {shard_of(WorkerId(f"{i}")) for i in range(300)} == set(range(NUM_SHARDS))


def test_entries_and_snapshots_round_trip() -> None:
    assert unpack_entry(pack_entry(entry(2**40, 1, 2**64 - 1))) == entry(2**40, 1, 2**64 - 1)
    assert unpack_snapshot(pack_snapshot(SNAPSHOT)) == SNAPSHOT


@pytest.mark.parametrize("cut", [0, 1, 17, 18, 20, -1])
def test_malformed_bytes_are_refused(cut: int) -> None:
    with pytest.raises(IndexFormatError):
        unpack_entry(pack_entry(entry(0, 1))[:cut])


def test_another_version_is_refused() -> None:
    for raw, unpack in ((pack_entry(entry(0, 1)), unpack_entry), (pack_snapshot(SNAPSHOT), unpack_snapshot)):
        with pytest.raises(IndexFormatError, match="version 9"):
            unpack(b"\x09" + raw[1:])


def test_a_worker_id_that_is_not_utf8_is_refused() -> None:
    raw = pack_entry(WorkerKVEvents(WorkerId("ab"), Incarnation(1), KVEventBatch(0, array("Q"))))
    with pytest.raises(IndexFormatError, match="worker"):
        unpack_entry(raw.replace(b"ab", b"\xff\xfe"))


class Index:
    def __init__(self, url: str, namespace: str) -> None:
        self.redis = RedisClient(url).redis
        self.writer = IndexWriter(url, namespace, WORKER)
        self.reader = IndexReader(url, namespace)
        self.stream = f"{{{namespace}:index:{shard_of(WORKER.id)}}}"


@pytest.fixture
async def index(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Index]:
    index = Index(redis_url, f"index-{request.node.name}")
    yield index
    for client in (index.writer, index.reader):
        await client.close()
    await index.redis.aclose()


pytestmark = pytest.mark.redis


async def test_entries_are_read_once_and_in_order(index: Index) -> None:
    await index.writer.append([entry(0, 4), entry(1, 8)])
    assert await index.reader.read() == ([entry(0, 4), entry(1, 8)], False)
    assert await index.reader.read() == ([], False)
    await index.writer.append([entry(2, 12)])
    assert (await index.reader.read())[0] == [entry(2, 12)]
    assert await index.redis.pttl(index.stream) > 0


async def test_many_are_read_in_parts(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "READ_ENTRIES", 2)
    await index.writer.append([entry(i, 4) for i in range(5)])
    seen = [await index.reader.read() for _ in range(3)]
    assert [(len(entries), has_more) for entries, has_more in seen] == [(2, True), (2, True), (1, False)]


async def test_a_stream_is_cut(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_ENTRIES", 100)
    for start in range(0, 600, 50):
        await index.writer.append([entry(start + i, 4) for i in range(50)])
    assert 100 <= await index.redis.xlen(index.stream) < 300


async def test_what_cannot_be_read_is_left_out(index: Index) -> None:
    await index.redis.xadd(index.stream, {b"f": b"nonsense"})
    await index.redis.xadd(index.stream, {b"x": b""})
    await index.writer.append([entry(0, 4)])
    assert (await index.reader.read())[0] == [entry(0, 4)]
    await index.redis.set(index.writer._snapshot_key, b"nonsense")
    assert await index.reader.snapshot(WORKER.id) is None


async def test_unreadable_values_are_logged_once(index: Index, caplog: pytest.LogCaptureFixture) -> None:
    """Another version may write thousands of unreadable values."""
    for _ in range(3):
        await index.redis.xadd(index.stream, {b"f": b"nonsense"})
    await index.reader.read()
    await index.redis.set(index.writer._snapshot_key, b"nonsense")
    await index.reader.snapshot(WORKER.id)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


async def test_a_snapshot_is_there_until_it_is_withdrawn(index: Index) -> None:
    assert await index.reader.snapshot(WORKER.id) is None and await index.writer.renew() is None
    await index.writer.write(SNAPSHOT)
    assert await index.reader.snapshot(WORKER.id) == SNAPSHOT and await index.writer.renew() == 0
    assert 0 < await index.redis.pttl(index.writer._snapshot_key) <= 30_000
    await index.writer.withdraw()
    assert await index.reader.snapshot(WORKER.id) is None


async def test_a_snapshot_request_reaches_only_its_incarnation(index: Index) -> None:
    await index.writer.write(SNAPSHOT)
    await index.reader.request_snapshot(WORKER, 12)
    assert await index.writer.renew() == 12
    await index.reader.request_snapshot(WorkerRef(WORKER.id, Incarnation(1), "host:1"), 13)
    assert await index.writer.renew() == 0
    await index.redis.set(index.writer._request_key, b"nonsense")
    assert await index.writer.renew() == 0


async def test_after_an_error_reading_restarts_at_the_oldest_entry(index: Index) -> None:
    await index.writer.append([entry(0, 4)])
    await index.reader.read()
    await index.redis.delete(index.stream)
    await index.redis.set(index.stream, b"in the way")
    with pytest.raises(StoreUnavailable):
        await index.reader.read()
    with pytest.raises(StoreUnavailable):
        await index.writer.append([entry(1, 8)])
    await index.redis.delete(index.stream)
    await index.redis.xadd(index.stream, {b"f": pack_entry(entry(0, 4))}, id="1-1")
    assert (await index.reader.read())[0] == [entry(0, 4)], "an id before those that were read"
