"""Test which peers can be read (ranks that hold each KV head once), and where our heads lie in their blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.ids import BlockId, Incarnation, WorkerId, WorkerRef
from tandem.engine.transfer_messages import TransportPeer, TransportRank
from tandem.kv.layout import KVGroup, KVLayout, KVRegion
from tandem.transfer.interface import BlockCopy, PeerError
from tandem.transfer.memory_pool import MemoryPool, agent_name
from tandem.transfer.peer_layout import CopyRefused, check_copies, check_peer, join_ranks, shares_of
from tests.memory_pools import memory_pool

HEADS = 8
LAYOUT = KVLayout(16, (KVGroup(2, HEADS, 16, "float8_e4m3fn"),))
WORKER = WorkerRef(WorkerId("w"), Incarnation(1), "h:1")


def rank_of(number: int, start: int, stop: int, num_blocks: int = 10) -> TransportRank:
    region = KVRegion(4096, num_blocks, (stop - start) * LAYOUT.head_bytes, start, stop)
    return TransportRank(agent_name(WORKER.id, WORKER.incarnation, number), b"", region)


def peer_of(*heads: tuple[int, int]) -> TransportPeer:
    return TransportPeer(WORKER, LAYOUT, tuple(rank_of(i, *each) for i, each in enumerate(heads)))


def pool_of(start: int, stop: int) -> MemoryPool:
    return memory_pool(1 << 20, 10, LAYOUT, heads=range(start, stop))


POOL = pool_of(2, 4)
FOUR = peer_of((0, 2), (2, 4), (4, 6), (6, 8))


@pytest.mark.parametrize(
    "peer",
    [
        peer_of(),
        peer_of((0, 2)),
        peer_of((0, 2), (2, 4), (4, 6)),
        peer_of((2, 4), (4, 6), (6, 8)),
        peer_of((0, 2), (4, 6), (6, 8)),
        peer_of((0, 4), (2, 8)),
        peer_of((0, 8), (0, 8)),
        peer_of((0, 8), (2, 4)),
        peer_of((0, 4), (4, 9)),
        peer_of((0, 4), (4, 4), (4, 8)),
    ],
    ids=lambda peer: "+".join(f"{rank.region.head_start}-{rank.region.head_stop}" for rank in peer.ranks) or "none",
)
def test_each_head_is_there_once(peer: TransportPeer) -> None:
    with pytest.raises(PeerError, match="must hold 8 KV heads, each once"):
        check_peer(POOL, peer)


def spoilt(number: int, **changes: int) -> TransportPeer:
    rank = FOUR.ranks[number]
    ranks = list(FOUR.ranks)
    ranks[number] = replace(rank, region=replace(rank.region, **changes))
    return replace(FOUR, ranks=tuple(ranks))


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (spoilt(3, num_blocks=9), "have .* blocks"),
        (spoilt(0, num_blocks=0), "have .* blocks"),
        (spoilt(2, block_bytes=17), "does not fit its layout"),
        (spoilt(1, address=0), "does not fit its layout"),
        (replace(FOUR, ranks=(*FOUR.ranks[:3], replace(FOUR.ranks[3], agent=FOUR.ranks[0].agent))), "one agent"),
        (replace(FOUR, layout=replace(LAYOUT, block_size=32)), "holds KV blocks of"),
        (replace(FOUR, layout=replace(LAYOUT, groups=LAYOUT.groups * 2)), r"holds KV blocks of 8h .* \+ 8h "),
        (replace(FOUR, layout=replace(LAYOUT, groups=())), "holds KV blocks of no layers"),
        (replace(FOUR, layout=KVLayout(16, (KVGroup(2, HEADS, 16, "bfloat16"),))), "holds KV blocks of"),
    ],
)
def test_what_cannot_be_copied_is_refused_with_its_reason(peer: TransportPeer, message: str) -> None:
    check_peer(POOL, FOUR)
    with pytest.raises(PeerError, match=message):
        check_peer(POOL, peer)


def test_ranks_may_be_listed_in_any_order() -> None:
    shuffled = replace(FOUR, ranks=FOUR.ranks[::-1])
    check_peer(pool_of(0, HEADS), shuffled)
    assert [share.local_offset // LAYOUT.head_bytes for share in shares_of(pool_of(0, HEADS), shuffled)] == [6, 4, 2, 0]


degrees = st.sampled_from([1, 2, 4, 8])


@given(degrees, degrees)
def test_shares_fill_each_of_our_heads_from_where_it_lies(giving: int, taking: int) -> None:
    """A byte per head stands for it: what shares copy is what a block of ours holds."""
    theirs, ours = HEADS // giving, HEADS // taking
    peer = peer_of(*((i * theirs, (i + 1) * theirs) for i in range(giving)))
    for rank in range(taking):
        pool = pool_of(rank * ours, (rank + 1) * ours)
        check_peer(pool, peer)
        block: list[int | None] = [None] * ours
        for share in shares_of(pool, peer):
            region = share.rank.region
            held = range(region.head_start, region.head_stop)
            source, target, num = (
                number // LAYOUT.head_bytes for number in (share.remote_offset, share.local_offset, share.num_bytes)
            )
            assert share.num_bytes == num * LAYOUT.head_bytes > 0
            assert block[target : target + num] == [None] * num, "a head is read twice"
            block[target : target + num] = held[source : source + num]
            assert share.is_whole is (giving == taking)
        assert block == list(pool.heads)


def test_a_pool_holds_heads_that_the_model_has() -> None:
    for start, stop in ((0, HEADS + 1), (3, 3), (-1, 2), (5, 4)):
        with pytest.raises(ValueError, match="a pool of KV heads"):
            pool_of(start, stop)
    assert MemoryPool(POOL.region, LAYOUT, keepalive=None) == POOL
    with pytest.raises(ValueError, match="no share of"):
        MemoryPool(replace(POOL.region, head_stop=8), LAYOUT, keepalive=None)


def test_descriptions_of_ranks_are_merged_into_one_peer() -> None:
    parts = [replace(FOUR, ranks=(rank,)) for rank in FOUR.ranks]
    assert join_ranks(parts) == FOUR
    stranger = replace(parts[1], worker=replace(WORKER, incarnation=Incarnation(2)))
    with pytest.raises(ValueError, match="different workers"):
        join_ranks([parts[0], stranger])


def with_trials(peer: TransportPeer, *numbers: int) -> TransportPeer:
    ranks = [
        replace(rank, region=replace(rank.region, num_probe_blocks=number))
        for rank, number in zip(peer.ranks, numbers, strict=True)
    ]
    return replace(peer, ranks=tuple(ranks))


def test_ranks_have_equally_many_trial_blocks() -> None:
    check_peer(POOL, with_trials(FOUR, 3, 3, 3, 3))
    with pytest.raises(PeerError, match=r"the ranks of .* have \[3, 3, 2, 3\] trial blocks"):
        check_peer(POOL, with_trials(FOUR, 3, 3, 2, 3))


@pytest.mark.parametrize(("remote", "local", "is_there"), [(15, 13, True), (16, 0, False), (0, 14, False)])
def test_trials_reach_the_blocks_behind_the_others_and_no_further(remote: int, local: int, is_there: bool) -> None:
    peer, pool = with_trials(FOUR, 3, 3, 3, 3), replace(POOL, region=replace(POOL.region, num_probe_blocks=2))
    copies = [BlockCopy(BlockId(remote), BlockId(local))]
    assert pool.num_bytes == 14 * pool.region.block_bytes
    if is_there:
        check_copies(pool, peer, copies)
    else:
        with pytest.raises(CopyRefused):
            check_copies(pool, peer, copies)
