"""Test that a forecast of free blocks is what the pool has after the same calls."""

from __future__ import annotations

from tandem.core.ids import BlockHash
from tandem.kv.block_pool import BlockPool, BlockTable, Holder
from tandem.kv.room_forecast import RoomForecast

HASHES = [BlockHash(bytes([number]) * 16) for number in range(3)]


def _filled(pool: BlockPool, num_blocks: int) -> BlockTable:
    table = BlockTable()
    pool.share(table, HASHES)
    assert pool.grow(table, num_blocks)
    pool.publish(table, HASHES[:num_blocks])
    return table


def test_tables_with_one_cached_prefix_take_its_free_blocks_once() -> None:
    pool = BlockPool(12, 2)
    pool.release(_filled(pool, 3))
    forecast = RoomForecast(pool)
    predicted = []
    for _ in range(2):
        forecast.fill(HASHES, 4)
        predicted.append(forecast.num_free)
    actual = []
    for _ in range(2):
        _filled(pool, 4)
        actual.append(pool.num_free)
    assert predicted == actual == [8, 7]


def test_shared_blocks_are_free_after_the_last_release() -> None:
    pool = BlockPool(12, 2)
    tables = [_filled(pool, 5), _filled(pool, 4)]
    pool.retain(tables[1].ids()[3:], Holder.LEASE)
    forecast = RoomForecast(pool)
    predicted = []
    for table in tables:
        forecast.release(table)
        predicted.append(forecast.num_free)
    actual = []
    for table in tables:
        pool.release(table)
        actual.append(pool.num_free)
    assert predicted == actual == [8, 11], "one block is leased"


def test_what_a_new_table_shares_with_a_released_one_stays_taken() -> None:
    pool = BlockPool(6, 2)
    old = _filled(pool, 5)
    forecast = RoomForecast(pool)
    forecast.fill(HASHES, 4)
    forecast.release(old)
    assert forecast.num_free == 2
    forecast.fill([], 4)
    assert forecast.num_free == -2
