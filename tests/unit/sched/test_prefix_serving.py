"""Test which cached blocks another worker may read, and which of them still need a digest."""

from __future__ import annotations

from tandem.core.ids import BlockHash, HandoffId
from tandem.core.ids import HandoffKey as Key
from tandem.kv.block_pool import BlockPool, BlockTable
from tandem.kv.handoff import RemotePrefixRequest
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.scheduler_state import SchedulerState
from tandem.sched.transfer.prefix_serving import PrefixServer

NAMES = tuple(BlockHash(bytes([number]) * 16) for number in range(1, 4))


def server_of_three_blocks() -> PrefixServer:
    """Return a prefix server of three cached blocks, without running sequences or reservations."""
    pool = BlockPool(8, 2)
    table = BlockTable()
    assert pool.grow(table, len(NAMES))
    pool.publish(table, NAMES)
    return PrefixServer(
        SchedulerState(pool, SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=64))
    )


def test_a_prefix_fetch_that_has_ended_is_digested_no_more() -> None:
    prefix_server = server_of_three_blocks()
    first, second = Key(HandoffId("a"), 1), Key(HandoffId("b"), 1)
    blocks = prefix_server.serve(first, RemotePrefixRequest(0, NAMES))
    assert len(blocks) == 3 and prefix_server.serve(second, RemotePrefixRequest(1, NAMES)) == blocks
    prefix_server.drop(first)
    assert prefix_server.take(0, 9) == ((blocks[1], 1), (blocks[2], 2))
    assert not prefix_server.has_work


def test_nothing_is_due_when_all_prefix_fetches_have_ended() -> None:
    prefix_server = server_of_three_blocks()
    prefix_server.serve(Key(HandoffId("a"), 1), RemotePrefixRequest(0, NAMES))
    assert prefix_server.is_due(0)
    prefix_server.drop(Key(HandoffId("a"), 1))
    assert not prefix_server.has_work and not prefix_server.is_due(0) and prefix_server.take(0, 9) == ()
