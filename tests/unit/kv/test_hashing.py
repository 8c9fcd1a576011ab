"""Test that block hashes are equal in every process and release, and shared only where the KV is equal."""

from __future__ import annotations

from itertools import combinations

import pytest

from tandem.kv.hashing import HASH_BYTES, chain_hashes, root_hash

TOKENS = list(range(10))


def test_hashes_are_pinned() -> None:
    """Check fixed values, because workers and indexes of different releases must agree on them."""
    root = root_hash("fingerprint", 16, "")
    assert root.hex() == "4ff27603d7479840b3d2d4f38f8b74a1"
    assert chain_hashes(root, range(16), 16)[0].hex() == "8f2dd0f739f63b61bffa854174c9f76a"
    assert [h.hex() for h in chain_hashes(root_hash("m", 4, "salt"), TOKENS, 4)] == [
        "fb9f9ab2d0d787090e5f940b5e112d02",
        "04fcfd3d87e066956551f23e18fc31a8",
    ]


def test_different_models_block_sizes_or_salts_share_nothing() -> None:
    roots = [root_hash("m", 4, ""), root_hash("n", 4, ""), root_hash("m", 2, ""), root_hash("m", 4, "s")]
    chains = [set(chain_hashes(root, TOKENS, 2)) for root in roots]
    assert all(a.isdisjoint(b) for a, b in combinations(chains, 2))


def test_the_parts_of_a_root_do_not_run_together() -> None:
    roots = {root_hash("ab", 1, "c"), root_hash("a", 1, "bc"), root_hash("ab1", 1, "c"), root_hash("ab", 11, "c")}
    assert len(roots) == 4


def test_one_hash_identifies_the_whole_prefix() -> None:
    root = root_hash("m", 2, "")
    ours, theirs = chain_hashes(root, [1, 2, 3, 4, 5], 2), chain_hashes(root, [9, 2, 3, 4, 5], 2)
    assert len(ours) == len(theirs) == 2
    assert set(ours).isdisjoint(theirs)
    assert chain_hashes(root, [1, 2, 3, 4, 6, 7], 2)[:2] == ours
    assert all(len(name) == HASH_BYTES for name in ours)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 8])
def test_only_full_blocks_have_hashes(num_tokens: int) -> None:
    assert len(chain_hashes(root_hash("m", 4, ""), TOKENS[:num_tokens], 4)) == num_tokens // 4


def test_a_token_is_four_bytes_wide() -> None:
    root = root_hash("m", 2, "")
    assert chain_hashes(root, [1, 0], 2) != chain_hashes(root, [0, 1], 2) != chain_hashes(root, [65536, 0], 2)
    with pytest.raises(OverflowError):
        chain_hashes(root, [2**32, 0], 2)
