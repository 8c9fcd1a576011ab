"""What a mirror makes of facts that come twice, late, too early or not at all."""

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
NEXT_LIFE = WorkerRef(WorkerId("a"), Incarnation(6), "host:2")
B = WorkerRef(WorkerId("b"), Incarnation(1), "host:3")


def word(number: int) -> int:
    return number << 2 | DEVICE


def told(first: int, *numbers: int, by: WorkerRef = A) -> WorkerKVEvents:
    return WorkerKVEvents(by.id, by.incarnation, KVEventBatch(first, array("Q", map(word, numbers))))


def snapshot(*numbers: int) -> CompactBlockSet:
    held = CompactBlockSet(len(numbers))
    held.write(map(word, numbers))
    return held


def held(mirror: KVIndexer, worker: WorkerRef = A) -> list[int]:
    blocks = mirror.table.held(worker)
    return [] if blocks is None else sorted(found >> 2 for found in blocks)


@pytest.fixture
def mirror() -> KVIndexer:
    mirror = KVIndexer(PrefixTable())
    mirror.expect([A])
    return mirror


def test_a_life_that_is_followed_from_its_beginning_needs_no_snapshot(mirror: KVIndexer) -> None:
    assert mirror.wanted() == [(A, 0)]
    mirror.take(told(0, 1, 2))
    mirror.take(told(2, 3))
    assert held(mirror) == [1, 2, 3] and not mirror.wanted()


def test_what_comes_again_is_skipped_to_the_fact(mirror: KVIndexer) -> None:
    for entry in (told(0, 1, 2), told(0, 1, 2), told(1, 2, 3, 4), told(2, 3)):
        mirror.take(entry)
    assert held(mirror) == [1, 2, 3, 4] and not mirror.wanted()


def test_behind_a_gap_facts_wait_for_a_snapshot_that_covers_it(mirror: KVIndexer) -> None:
    mirror.take(told(0, 1, 2))
    mirror.take(told(5, 6))
    mirror.take(told(6, 7))
    assert held(mirror) == [1, 2], "hints of before stay"
    assert mirror.wanted() == [(A, 5)]
    assert not mirror.load(A, 4, snapshot(1, 2, 3))
    assert held(mirror) == [1, 2] and mirror.wanted() == [(A, 5)]
    assert mirror.load(A, 6, snapshot(2, 3, 4, 5, 6))
    assert held(mirror) == [2, 3, 4, 5, 6, 7] and not mirror.wanted()


def test_a_gap_among_what_waits_wants_another_snapshot(mirror: KVIndexer) -> None:
    for entry in (told(0, 1), told(3, 4), told(8, 9)):
        mirror.take(entry)
    assert mirror.load(A, 3, snapshot(1, 2, 3))
    assert held(mirror) == [1, 2, 3, 4] and mirror.wanted() == [(A, 8)]


def test_what_was_told_before_a_worker_was_expected_is_in_the_snapshot_that_is_wanted(mirror: KVIndexer) -> None:
    mirror.take(told(0, 1, 2, by=B))
    mirror.expect([A, B])
    assert (B, 2) in mirror.wanted()
    assert not mirror.load(B, 0, snapshot()) and mirror.load(B, 2, snapshot(1, 2))
    assert held(mirror, B) == [1, 2]


def test_another_life_is_not_mixed_with_this_one(mirror: KVIndexer) -> None:
    mirror.take(told(0, 1, 2))
    mirror.take(told(0, 8, by=NEXT_LIFE))
    assert held(mirror) == [1, 2]
    assert mirror.expect([NEXT_LIFE]) == [A]
    assert held(mirror) == [] and mirror.table.num_workers == 0
    mirror.take(told(2, 3))
    assert not mirror.load(A, 9, snapshot(1)), "the dead tell nothing"
    assert mirror.wanted() == [(NEXT_LIFE, 1)]
    assert mirror.load(NEXT_LIFE, 1, snapshot(8)) and held(mirror, NEXT_LIFE) == [8]


def test_an_older_life_is_not_heard_over_a_newer_one(mirror: KVIndexer) -> None:
    mirror.expect([])
    mirror.take(told(0, 8, by=NEXT_LIFE))
    mirror.take(told(0, 1, 2, 3))
    mirror.expect([NEXT_LIFE])
    assert mirror.wanted() == [(NEXT_LIFE, 1)]


def test_an_entry_without_facts_shows_what_was_lost(mirror: KVIndexer) -> None:
    mirror.take(told(0, 1, 2))
    mirror.take(told(2))
    assert not mirror.wanted()
    mirror.take(told(4))
    mirror.take(told(4))
    assert mirror.wanted() == [(A, 4)]
    assert mirror.load(A, 4, snapshot(1)) and held(mirror) == [1] and not mirror.wanted()


def test_a_worker_that_has_told_nothing_yet_needs_no_snapshot(mirror: KVIndexer) -> None:
    mirror.take(told(0))
    assert not mirror.wanted() and held(mirror) == []
    mirror.take(told(0, 1))
    assert held(mirror) == [1]


def test_whoever_leaves_takes_its_blocks_along(mirror: KVIndexer) -> None:
    mirror.take(told(0, 1))
    assert mirror.expect([]) == [A] and mirror.table.num_blocks == 0 and not mirror.wanted()


def test_doubt_wants_a_snapshot_of_now(mirror: KVIndexer) -> None:
    mirror.take(told(0, 1, 2, 3))
    mirror.doubt(A)
    mirror.doubt(B)
    assert mirror.wanted() == [(A, 3)] and held(mirror) == [1, 2, 3]
    assert not mirror.load(A, 2, snapshot(1))
    mirror.take(told(0, 1, 2, 3))
    assert mirror.wanted(), "reading the beginning again settles no doubt"
    assert mirror.load(A, 3, snapshot(1)) and held(mirror) == [1]


def test_too_much_that_waits_is_dropped_and_a_later_snapshot_wanted(
    mirror: KVIndexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_indexer, "MAX_WAITING", 6)
    for first in range(2, 8):
        mirror.take(told(first, first))
    assert mirror.wanted() == [(A, 6)]
    assert not mirror.load(A, 4, snapshot(2, 3)) and mirror.load(A, 6, snapshot(5))
    assert held(mirror) == [5, 6, 7]


def test_what_was_heard_of_is_bounded(mirror: KVIndexer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_indexer, "MAX_HEARD", 2)
    for number in range(5):
        mirror.take(told(0, 1, by=WorkerRef(WorkerId(f"w{number}"), Incarnation(1), "host:9")))
    assert len(mirror._heard) == 2
