"""Test the probe blocks behind a pool: they are equal in every pool of a layout, however heads are divided."""

from __future__ import annotations

import pytest
import torch

from tandem.core.ids import BlockId
from tandem.kv.layout import KVGroup, KVLayout
from tandem.runtime.kv_cache import KVCache

LAYOUT = KVLayout(16, (KVGroup(3, 4, 8, "float32"),))


@pytest.mark.parametrize("heads", [range(4), range(2), range(2, 4), range(3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_digests_are_those_of_what_lies_there(heads: range, dtype: str) -> None:
    layout = KVLayout(16, (KVGroup(3, 4, 8, dtype),))
    cache = KVCache(layout, 5, heads=heads)
    digests = cache.fill_trial_blocks()
    region = cache.region
    assert len(digests) == region.num_probe_blocks == layout.for_rank(heads).num_probe_blocks >= 2
    assert len(set(digests)) == len(digests) and all(len(set(each)) == 4 for each in digests)
    numbers = range(region.num_probe_blocks)
    found = cache.digest_here([BlockId(5 + number) for number in numbers], list(numbers))
    assert found == [each[heads.start : heads.stop] for each in digests]
    whole = KVCache(layout, 2)
    assert whole.fill_trial_blocks()[: len(digests)] == digests[: whole.region.num_probe_blocks]


def test_the_pool_is_not_touched_and_ends_before_them() -> None:
    cache = KVCache(LAYOUT, 5)
    cache.fill_trial_blocks()
    assert cache.pool.shape[0] == cache.num_blocks == 5 and not torch.any(cache.pool)
    assert cache.region.num_all_blocks == 5 + 2 * cache.region.num_probe_blocks
    cache.pool.fill_(1.0)
    targets = cache.digest_here([BlockId(cache.region.num_all_blocks - 1)], [0])
    assert targets == KVCache(LAYOUT, 1).digest_here([BlockId(0)], [0]), "the last one is still zeros"


@pytest.mark.parametrize(("layers", "num"), [(1, 256), (256, 8), (200_000, 2)])
def test_there_are_enough_of_them_to_measure_and_never_many(layers: int, num: int) -> None:
    layout = KVLayout(16, (KVGroup(layers, 2, 16, "float32"),))
    assert layout.num_probe_blocks == num and layout.probe_bytes == 2 * num * layout.block_bytes
