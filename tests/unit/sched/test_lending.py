"""Which blocks another worker may read of this one's cache, and which of them are still to be digested."""

from __future__ import annotations

from tandem.core.ids import BlockHash, HandoffId
from tandem.core.ids import HandoffKey as Key
from tandem.kv.handoff import Borrow
from tandem.kv.pool import BlockPool, BlockTable
from tandem.sched.lending import Lending

NAMES = tuple(BlockHash(bytes([number]) * 16) for number in range(1, 4))


def lending_of_three_blocks() -> Lending:
    """Nobody runs, and nothing is promised."""
    pool = BlockPool(8, 2)
    table = BlockTable()
    assert pool.grow(table, len(NAMES))
    pool.publish(table, NAMES)
    return Lending(pool, (), {})


def test_a_loan_that_has_ended_is_digested_no_more() -> None:
    lending = lending_of_three_blocks()
    first, second = Key(HandoffId("a"), 1), Key(HandoffId("b"), 1)
    blocks = lending.lend(first, Borrow(0, NAMES))
    assert len(blocks) == 3 and lending.lend(second, Borrow(1, NAMES)) == blocks
    lending.drop(first)
    assert lending.take(0, 9) == ((blocks[1], 1), (blocks[2], 2))
    assert not lending.has_work


def test_nothing_is_due_when_all_loans_have_ended() -> None:
    lending = lending_of_three_blocks()
    lending.lend(Key(HandoffId("a"), 1), Borrow(0, NAMES))
    assert lending.is_due(0)
    lending.drop(Key(HandoffId("a"), 1))
    assert not lending.has_work and not lending.is_due(0) and lending.take(0, 9) == ()
