"""Test which prefixes are retained: quotas, room taken from the tenant with most, ends, and their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.ids import BlockHash, TenantId
from tandem.kv.block_pool import BlockPool, BlockTable
from tandem.kv.hashing import HASH_BYTES
from tandem.kv.retained_prefixes import RetainedPrefixes

A, B = TenantId("a"), TenantId("b")


def chain(name: str, length: int) -> list[BlockHash]:
    return [BlockHash(f"{name}{i}".encode().ljust(HASH_BYTES)) for i in range(length)]


P, Q = chain("p", 6), chain("q", 6)


def test_what_is_retained_ends_at_its_time_last_blocks_first() -> None:
    book = RetainedPrefixes(100)
    assert book.retain(A, P[:3], 10.0) == (P[:3], [])
    assert book.retain(A, P, 20.0) == (P[3:], []), "the beginning lasts as long as the rest"
    assert book.expire(10.0) == []
    assert book.expire(20.0) == P[::-1] and len(book) == 0


def test_a_shorter_time_takes_nothing_away() -> None:
    book = RetainedPrefixes(100)
    book.retain(A, P[:2], 20.0)
    assert book.retain(A, P[:3], 10.0) == ([P[2]], [])
    assert book.expire(10.0) == [P[2]] and P[0] in book


def test_a_prefix_of_two_tenants_lasts_until_neither_retains_it() -> None:
    book = RetainedPrefixes(100)
    assert book.retain(A, P[:2], 10.0) == (P[:2], [])
    assert book.retain(B, P[:2], 20.0) == ([], [])
    assert (len(book), book.num_of(A)) == (4, 2)
    assert book.expire(10.0) == [] and book.expire(20.0) == [P[1], P[0]]


def test_a_tenant_over_its_quota_loses_what_ends_first() -> None:
    book = RetainedPrefixes(100)
    book.retain(A, P[:3], 10.0, 4)
    assert book.retain(A, Q[:3], 20.0, 4) == (Q[:3], [P[2], P[1]])
    assert book.retain(A, chain("r", 9), 5.0, 4) == ([], []), "what is there lasts longer"


def test_a_quota_smaller_than_a_prefix_holds_its_beginning() -> None:
    book = RetainedPrefixes(100)
    assert book.retain(A, P, 10.0, 2) == (P[:2], [])
    assert book.retain(A, P, 20.0, 2) == ([], []), "and not its end in place of that"


def test_a_full_book_takes_from_the_tenant_that_has_most() -> None:
    book = RetainedPrefixes(6)
    book.retain(A, P, 10.0)
    assert book.retain(B, Q, 10.0) == (Q[:3], [P[5], P[4], P[3]])
    assert (book.num_of(A), book.num_of(B)) == (3, 3)


def test_nothing_is_retained_without_room() -> None:
    assert RetainedPrefixes(0).retain(A, P, 10.0) == ([], [])


def test_a_hash_that_is_gone_is_forgotten_for_all() -> None:
    book = RetainedPrefixes(100)
    book.retain(A, P[:2], 10.0)
    book.retain(B, P[:2], 10.0)
    book.forget(P[1])
    book.forget(P[1])
    assert len(book) == 2 and book.expire(10.0) == [P[0]]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([A, B]),
            st.sampled_from([P, Q]),
            st.integers(1, 6),
            st.integers(0, 8),
            st.integers(0, 5),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_parents_outlive_children_and_no_bound_is_exceeded(
    actions: list[tuple[TenantId, list[BlockHash], int, int, int, bool]],
) -> None:
    book, now = RetainedPrefixes(7), 0.0
    for tenant, prefix, length, ttl, quota, is_time_passing in actions:
        before = {block_hash for block_hash in (*P, *Q) if block_hash in book}
        fresh, lost = book.retain(tenant, prefix[:length], now + ttl, quota)
        after = {block_hash for block_hash in (*P, *Q) if block_hash in book}
        assert after == (before | set(fresh)) - set(lost)
        assert not quota or book.num_of(tenant) <= max(quota, len(before))
        now += is_time_passing
        lost = book.expire(now)
        book.check()
        for each in (P, Q):
            kept = [block_hash in book for block_hash in each]
            assert kept == sorted(kept, reverse=True), "a child is retained without its parent"
            places = [each.index(block_hash) for block_hash in lost if block_hash in each]
            assert places == sorted(places, reverse=True)


def test_a_block_that_passes_from_one_tenant_to_another_is_neither_new_nor_lost() -> None:
    book = RetainedPrefixes(7)
    book.retain(A, P[:1], 1.0)
    book.retain(A, Q, 2.0)
    assert book.retain(B, P[:1], 3.0) == ([], []) and P[0] in book
    book.check()


def test_renewals_take_no_memory() -> None:
    book = RetainedPrefixes(7)
    book.retain(A, Q[:1], 1.0)
    for number in range(1000):
        book.retain(A, P, 2.0 + number)
    book.check()
    assert sum(map(len, book._ends.values())) < 100


def publish(pool: BlockPool, hashes: list[BlockHash]) -> None:
    """Cache a prefix in fresh blocks, and let it go."""
    table = BlockTable()
    pool.share(table, hashes)
    assert pool.grow(table, len(hashes))
    pool.publish(table, hashes)
    pool.release(table)


def test_retained_blocks_are_reused_last() -> None:
    pool = BlockPool(8, 1, max_retained_blocks=4)
    publish(pool, P[:4])
    pool.keep_cached(A, P[:4], 10.0)
    publish(pool, Q[:4])
    publish(pool, chain("r", 4))
    assert pool.count_hits(P[:4]) == 4 and pool.count_hits(Q[:4]) == 0 and pool.num_free == 8
    pool.end_retentions(10.0)
    publish(pool, chain("s", 4))
    publish(pool, chain("t", 4))
    assert pool.count_hits(P[:4]) == 0 and pool.num_retained == 0
    pool.check([], [], [])


def test_running_sequences_get_retained_blocks_where_there_are_no_others() -> None:
    pool = BlockPool(4, 1, max_retained_blocks=4)
    publish(pool, P[:4])
    pool.keep_cached(A, P[:4], 10.0)
    table = BlockTable()
    assert pool.grow(table, 3) and pool.count_hits(P[:4]) == 1 and pool.num_retained == 1
    pool.check([table], [], [])
