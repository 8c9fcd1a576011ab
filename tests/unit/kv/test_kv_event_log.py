"""Test that KV events of a worker are numbered, in order, and bounded in number while they wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.events import BlockEvicted, BlockOffloaded, BlockStored, KVFact
from tandem.core.ids import BlockHash
from tandem.kv.hashing import chain_hashes, root_hash
from tandem.kv.kv_event_codec import DEVICE, HOST, encode_event, short_hash
from tandem.kv.kv_event_log import KVEventLog
from tests.effort import effort

CHAIN = chain_hashes(root_hash("model", 1, ""), range(20), 1)


def stored(chain: list[BlockHash]) -> list[KVFact]:
    return [BlockStored(block, parent) for block, parent in zip(chain, [None, *chain], strict=False)]


def test_events_keep_their_numbers_after_acknowledgement() -> None:
    log = KVEventLog(1, 100, 100)
    log.add(stored(CHAIN[:5]))
    assert (log.waiting(2).first, list(log.waiting(2).words)) == (0, [short_hash(b) | DEVICE for b in CHAIN[:2]])
    assert log.waiting(2, after=4) == (4, log.waiting(9).words[4:])
    log.acknowledge(3)
    log.acknowledge(2)
    log.add([BlockOffloaded(CHAIN[4]), BlockEvicted(CHAIN[4])])
    assert log.waiting(9).first == 3 and log.waiting(9).end == log.end == 7
    assert list(log.waiting(9).words[2:]) == [short_hash(CHAIN[4]) | HOST, short_hash(CHAIN[4])]
    assert len(log.held) == 4


def test_too_many_waiting_events_are_dropped_and_only_their_result_is_kept() -> None:
    log = KVEventLog(1, 100, 6)
    log.add(stored(CHAIN[:6]))
    assert log.num_waiting == 6 and not log.has_lost
    log.add(stored(CHAIN[:7])[6:])
    assert log.has_lost and log.num_waiting == 0 and log.end == 7
    log.add([BlockEvicted(CHAIN[6])])
    assert log.waiting(9).first == 7
    assert set(log.held) == {short_hash(b) | DEVICE for b in CHAIN[:6]}


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
def test_with_a_stride_only_each_stride_th_block_of_a_chain_counts(stride: int) -> None:
    log = KVEventLog(stride, 100, 100)
    other = chain_hashes(root_hash("model", 1, ""), [*range(7), *range(50, 60)], 1)
    facts = [*stored(CHAIN), *stored(other)[7:]]
    log.add(facts)
    due = {short_hash(b) | DEVICE for chain in (CHAIN, other) for b in chain[stride - 1 :: stride]}
    assert set(log.held) == due and log.end == len(due)
    log.add([BlockOffloaded(b) for b in reversed(CHAIN[7:])])
    log.add([BlockEvicted(b) for b in reversed(CHAIN[7:])])
    assert set(log.held) == {short_hash(b) | DEVICE for b in other[stride - 1 :: stride]}


@effort(60)
@given(st.lists(st.tuples(st.integers(0, 19), st.booleans()), max_size=60), st.integers(1, 12))
def test_a_reader_of_all_events_holds_the_same_blocks(steps: list[tuple[int, bool]], most: int) -> None:
    log, received, present = KVEventLog(1, 4, 1000), dict[int, int](), 0
    for length, takes in steps:
        for place in range(present, length):
            log.add([BlockStored(CHAIN[place], CHAIN[place - 1] if place else None)])
        log.add([BlockEvicted(block) for block in reversed(CHAIN[length:present])])
        present = length
        facts = log.waiting(most)
        assert facts.first == log.end - log.num_waiting
        if takes:
            received |= {word & ~3: word & 3 for word in facts.words}
            log.acknowledge(facts.end)
    received |= {word & ~3: word & 3 for word in log.waiting(1000).words}
    assert {name | tier for name, tier in received.items() if tier} == set(log.held)
    assert set(log.held) == {encode_event(fact) for fact in stored(CHAIN[:present])}


def test_a_stride_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="stride must be at least 1, got 0"):
        KVEventLog(0, 1, 1)
