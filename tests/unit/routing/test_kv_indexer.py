"""Test how the indexer handles KV events that arrive twice, late, too early or not at all."""

from __future__ import annotations

from array import array

import pytest

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.kv.compact_block_set import CompactBlockSet
from tandem.kv.kv_event_codec import DEVICE
from tandem.kv.kv_event_log import KVEventBatch
from tandem.routing import kv_indexer
from tandem.routing.kv_indexer import KVIndexer, WorkerKVEvents
from tandem.routing.prefix_index import PrefixTable

A = WorkerRef(WorkerId("a"), Incarnation(5), "host:1")
NEXT_INCARNATION = WorkerRef(WorkerId("a"), Incarnation(6), "host:2")
B = WorkerRef(WorkerId("b"), Incarnation(1), "host:3")


def word(number: int) -> int:
    return number << 2 | DEVICE


def events(first: int, *numbers: int, worker: WorkerRef = A) -> WorkerKVEvents:
    return WorkerKVEvents(worker.id, worker.incarnation, KVEventBatch(first, array("Q", map(word, numbers))))


def snapshot(*numbers: int) -> CompactBlockSet:
    held = CompactBlockSet(len(numbers))
    held.write(map(word, numbers))
    return held


def held(indexer: KVIndexer, worker: WorkerRef = A) -> list[int]:
    blocks = indexer.table.held(worker)
    return [] if blocks is None else sorted(block >> 2 for block in blocks)


@pytest.fixture
def indexer() -> KVIndexer:
    indexer = KVIndexer(PrefixTable())
    indexer.set_workers([A])
    return indexer


def test_an_incarnation_followed_from_its_first_event_needs_no_snapshot(indexer: KVIndexer) -> None:
    assert indexer.missing_snapshots() == [(A, 0)]
    indexer.take(events(0, 1, 2))
    indexer.take(events(2, 3))
    assert held(indexer) == [1, 2, 3] and not indexer.missing_snapshots()


def test_repeated_events_are_skipped(indexer: KVIndexer) -> None:
    for entry in (events(0, 1, 2), events(0, 1, 2), events(1, 2, 3, 4), events(2, 3)):
        indexer.take(entry)
    assert held(indexer) == [1, 2, 3, 4] and not indexer.missing_snapshots()


def test_events_behind_a_gap_wait_for_a_snapshot_that_covers_it(indexer: KVIndexer) -> None:
    indexer.take(events(0, 1, 2))
    indexer.take(events(5, 6))
    indexer.take(events(6, 7))
    assert held(indexer) == [1, 2], "hints of before stay"
    assert indexer.missing_snapshots() == [(A, 5)]
    assert not indexer.load(A, 4, snapshot(1, 2, 3))
    assert held(indexer) == [1, 2] and indexer.missing_snapshots() == [(A, 5)]
    assert indexer.load(A, 6, snapshot(2, 3, 4, 5, 6))
    assert held(indexer) == [2, 3, 4, 5, 6, 7] and not indexer.missing_snapshots()


def test_a_gap_among_waiting_events_needs_another_snapshot(indexer: KVIndexer) -> None:
    for entry in (events(0, 1), events(3, 4), events(8, 9)):
        indexer.take(entry)
    assert indexer.load(A, 3, snapshot(1, 2, 3))
    assert held(indexer) == [1, 2, 3, 4] and indexer.missing_snapshots() == [(A, 8)]


def test_the_snapshot_must_cover_events_before_a_worker_was_expected(indexer: KVIndexer) -> None:
    indexer.take(events(0, 1, 2, worker=B))
    indexer.set_workers([A, B])
    assert (B, 2) in indexer.missing_snapshots()
    assert not indexer.load(B, 0, snapshot()) and indexer.load(B, 2, snapshot(1, 2))
    assert held(indexer, B) == [1, 2]


def test_incarnations_are_not_mixed(indexer: KVIndexer) -> None:
    indexer.take(events(0, 1, 2))
    indexer.take(events(0, 8, worker=NEXT_INCARNATION))
    assert held(indexer) == [1, 2]
    assert indexer.set_workers([NEXT_INCARNATION]) == [A]
    assert held(indexer) == [] and indexer.table.num_workers == 0
    indexer.take(events(2, 3))
    assert not indexer.load(A, 9, snapshot(1)), "the dead tell nothing"
    assert indexer.missing_snapshots() == [(NEXT_INCARNATION, 1)]
    assert indexer.load(NEXT_INCARNATION, 1, snapshot(8)) and held(indexer, NEXT_INCARNATION) == [8]


def test_an_older_incarnation_does_not_replace_a_newer_one(indexer: KVIndexer) -> None:
    indexer.set_workers([])
    indexer.take(events(0, 8, worker=NEXT_INCARNATION))
    indexer.take(events(0, 1, 2, 3))
    indexer.set_workers([NEXT_INCARNATION])
    assert indexer.missing_snapshots() == [(NEXT_INCARNATION, 1)]


def test_an_empty_batch_reveals_a_gap(indexer: KVIndexer) -> None:
    indexer.take(events(0, 1, 2))
    indexer.take(events(2))
    assert not indexer.missing_snapshots()
    indexer.take(events(4))
    indexer.take(events(4))
    assert indexer.missing_snapshots() == [(A, 4)]
    assert indexer.load(A, 4, snapshot(1)) and held(indexer) == [1] and not indexer.missing_snapshots()


def test_a_worker_without_events_needs_no_snapshot(indexer: KVIndexer) -> None:
    indexer.take(events(0))
    assert not indexer.missing_snapshots() and held(indexer) == []
    indexer.take(events(0, 1))
    assert held(indexer) == [1]


def test_the_blocks_of_a_gone_worker_are_dropped(indexer: KVIndexer) -> None:
    indexer.take(events(0, 1))
    assert indexer.set_workers([]) == [A] and indexer.table.num_blocks == 0 and not indexer.missing_snapshots()


def test_a_suspect_worker_needs_a_current_snapshot(indexer: KVIndexer) -> None:
    indexer.take(events(0, 1, 2, 3))
    indexer.suspect(A)
    indexer.suspect(B)
    assert indexer.missing_snapshots() == [(A, 3)] and held(indexer) == [1, 2, 3]
    assert not indexer.load(A, 2, snapshot(1))
    indexer.take(events(0, 1, 2, 3))
    assert indexer.missing_snapshots(), "reading the first events again does not replace the snapshot"
    assert indexer.load(A, 3, snapshot(1)) and held(indexer) == [1]


def test_too_many_waiting_events_are_dropped_and_a_later_snapshot_is_needed(
    indexer: KVIndexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_indexer, "MAX_WAITING", 6)
    for first in range(2, 8):
        indexer.take(events(first, first))
    assert indexer.missing_snapshots() == [(A, 6)]
    assert not indexer.load(A, 4, snapshot(2, 3)) and indexer.load(A, 6, snapshot(5))
    assert held(indexer) == [5, 6, 7]


def test_remembered_positions_are_bounded(indexer: KVIndexer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_indexer, "MAX_POSITIONS", 2)
    for number in range(5):
        indexer.take(events(0, 1, worker=WorkerRef(WorkerId(f"w{number}"), Incarnation(1), "host:9")))
    assert len(indexer._positions) == 2
