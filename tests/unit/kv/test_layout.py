"""Test block arithmetic and the fingerprint that decides which workers may exchange blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.kv.layout import KVGroup, KVLayout, ModelFingerprint

LAYOUT = KVLayout(16, (KVGroup(layers=30, heads=3, head_dim=64, dtype="float32"),))


def test_a_block_is_all_layers_of_all_heads() -> None:
    assert LAYOUT.block_shape() == (3, 30, 2, 16, 64)
    assert LAYOUT.group.head_bytes(16) == 30 * 2 * 16 * 64 * 4
    assert LAYOUT.block_bytes == 3 * LAYOUT.group.head_bytes(16)
    assert LAYOUT.token_bytes * 16 == LAYOUT.block_bytes


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_bytes_follow_the_type(dtype: str, size: int) -> None:
    layout = KVLayout(8, (KVGroup(layers=2, heads=1, head_dim=4, dtype=dtype),))
    assert layout.block_bytes == 2 * 2 * 8 * 4 * size


def test_float8_has_its_scales_in_the_block() -> None:
    layout = KVLayout(8, (KVGroup(layers=2, heads=3, head_dim=4, dtype="float8_e4m3fn"),))
    tile = 8 * 4 + 8 * 4
    assert layout.block_shape() == (3, 2, 2, tile)
    assert layout.group.head_bytes(8) == 2 * 2 * tile
    assert layout.block_bytes == 3 * 2 * 2 * tile


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_a_ragged_tail_takes_a_block(num_tokens: int, num_blocks: int) -> None:
    assert LAYOUT.num_blocks_for(num_tokens) == num_blocks


def test_every_part_of_a_fingerprint_counts() -> None:
    base = ModelFingerprint("w", "none", "float32", "rope", "t", 16)
    others = [
        replace(base, weights_digest="v"),
        replace(base, quantization="int8"),
        replace(base, kv_dtype="float16"),
        replace(base, architecture="other"),
        replace(base, tokenizer_digest="u"),
        replace(base, block_size=32),
        replace(base, arithmetic="one"),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 8
    assert base.digest == "993835b492bf4c45903746b694e0dda9"
