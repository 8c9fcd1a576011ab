"""Test which worker holds how much of a prompt, against sets of whole hashes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.events import BlockEvicted, BlockOffloaded, BlockStored, KVFact
from tandem.core.ids import BlockHash, Incarnation, WorkerId, WorkerRef
from tandem.kv.compact_block_set import CompactBlockSet
from tandem.kv.hashing import chain_hashes, root_hash
from tandem.kv.kv_event_codec import DEVICE, GONE, HOST, TIER_MASK, encode_event, short_hash
from tandem.routing.prefix_index import PrefixHit, PrefixTable
from tests.effort import effort

ROOT = root_hash("model", 1, "")
CHAIN = chain_hashes(ROOT, range(40), 1)
OTHER = chain_hashes(ROOT, [*range(10), *range(90, 120)], 1)


def worker(name: str, incarnation: int = 1) -> WorkerRef:
    return WorkerRef(WorkerId(name), Incarnation(incarnation), "host:1")


A, B, C = worker("a"), worker("b"), worker("c")


def stored(hashes: list[BlockHash]) -> list[BlockStored]:
    return [BlockStored(h, None) for h in hashes]


def test_a_hit_is_as_long_as_what_both_have_in_common() -> None:
    table = PrefixTable()
    table.apply(A, stored(CHAIN[:25]))
    table.apply(B, stored(OTHER))
    assert table.match(CHAIN) == {A: PrefixHit(25, 25), B: PrefixHit(10, 10)}
    assert table.match(OTHER) == {A: PrefixHit(10, 10), B: PrefixHit(40, 40)}
    assert table.match(CHAIN[:7]) == {A: PrefixHit(7, 7), B: PrefixHit(7, 7)}
    assert not table.match(chain_hashes(root_hash("model", 1, "salt"), range(40), 1)) and not table.match([])


def test_blocks_moved_to_host_memory_are_still_a_hit() -> None:
    table = PrefixTable()
    table.apply(A, [*stored(CHAIN[:8]), *(BlockOffloaded(h) for h in reversed(CHAIN[3:8])), BlockEvicted(CHAIN[7])])
    assert table.match(CHAIN) == {A: PrefixHit(7, 3)}
    table.apply(A, stored(CHAIN[3:5]))
    assert table.match(CHAIN) == {A: PrefixHit(7, 5)}


def test_a_worker_without_blocks_left_is_no_hit() -> None:
    table = PrefixTable()
    table.apply(A, stored(CHAIN))
    table.apply(B, stored(CHAIN))
    table.drop(A)
    table.apply(B, [BlockEvicted(h) for h in reversed(CHAIN)])
    table.drop(C)
    assert not table.match(CHAIN) and table.num_blocks == 0


def test_a_load_replaces_the_known_blocks() -> None:
    table = PrefixTable()
    table.apply(A, stored(CHAIN))
    held = CompactBlockSet(2)
    held.write(map(encode_event, stored(CHAIN[:2])))
    table.load(A, held)
    assert table.match(CHAIN) == {A: PrefixHit(2, 2)} and table.held(A) is held and table.held(B) is None


@pytest.mark.parametrize("num_held", range(14))
def test_with_a_stride_hits_are_its_multiples(num_held: int) -> None:
    table = PrefixTable(stride=4)
    table.apply(A, stored(CHAIN[3:num_held:4]))
    whole = num_held - num_held % 4
    assert table.match(CHAIN) == ({A: PrefixHit(whole, whole)} if whole else {})
    assert not table.match(CHAIN[:3])


@effort(100)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12))
def test_every_worker_gets_its_own_length(lengths: list[tuple[int, int]]) -> None:
    """Search bounds learned from one worker do not change the result of the next."""
    table, due = PrefixTable(), {}
    for i, (num, num_host) in enumerate(lengths):
        table.apply(
            worker(f"w{i}"), [*stored(CHAIN[:num]), *(BlockOffloaded(h) for h in CHAIN[max(0, num - num_host) : num])]
        )
        if num:
            due[worker(f"w{i}")] = PrefixHit(num, max(0, num - num_host))
    assert table.match(CHAIN) == due


# Few names with few different low bits, so that probing runs into neighbours and around the end.
NAMES = st.integers(0, 11).flatmap(lambda low: st.integers(0, 5).map(lambda high: (high << 40 | low) << 2 | 1 << 60))


@effort(200)
@given(st.lists(st.tuples(NAMES, st.sampled_from([GONE, GONE, HOST, DEVICE])), max_size=80), st.integers(0, 40))
def test_the_block_set_behaves_like_a_dictionary(words: list[tuple[int, int]], capacity: int) -> None:
    held, plain = CompactBlockSet(capacity), dict[int, int]()
    for name, tier in words:
        held.write([name | tier])
        plain[name] = tier
        held.check()
        assert all(held.tier(n) == t for n, t in plain.items())
    assert sorted(held) == sorted(name | tier for name, tier in plain.items() if tier)


def test_encoded_words_equal_their_events() -> None:
    name = short_hash(CHAIN[0])
    facts: list[KVFact] = [BlockStored(CHAIN[0], None), BlockOffloaded(CHAIN[0]), BlockEvicted(CHAIN[0])]
    assert [encode_event(fact) - name for fact in facts] == [DEVICE, HOST, GONE]
    assert name & TIER_MASK == 0 and 0 < name < 2**64


def test_a_block_takes_less_than_thirty_bytes() -> None:
    held = CompactBlockSet()
    for i in range(20_000):
        held.write([(i * 0x9E3779B97F4A7C15 % 2**64) & ~TIER_MASK | DEVICE])
        assert i < 1000 or held.num_bytes < 30 * len(held)
