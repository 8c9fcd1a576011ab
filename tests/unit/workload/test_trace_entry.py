"""Test that a recorded request's prompt shares exactly the blocks of equal ids."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.workload.trace_entry import PromptBlocks, TraceEntry

SIZE = 32


def tokens(ids: Sequence[int], num_tokens: int, number: int = 0, seed: int = 1) -> tuple[int, ...]:
    return TraceEntry(0, PromptBlocks(num_tokens, tuple(ids), SIZE), 1).tokens(seed, number, "")


IDS = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@given(IDS, IDS, st.integers(1, SIZE), st.integers(0, 9))
def test_blocks_are_equal_where_their_ids_are(one: list[int], other: list[int], last: int, number: int) -> None:
    first, second = tokens(one, len(one) * SIZE), tokens(other, (len(other) - 1) * SIZE + last, number)
    assert (len(first), len(second)) == (len(one) * SIZE, (len(other) - 1) * SIZE + last)
    for i, name in enumerate(one):
        for j, other_name in enumerate(other):
            block = second[j * SIZE : (j + 1) * SIZE]
            same = first[i * SIZE : i * SIZE + len(block)] == block
            # A last block of one or two tokens may agree by chance.
            assert same == (name == other_name) or (len(block) < 3 and same)


def test_unknown_tokens_are_generated_by_seed_and_number() -> None:
    entry = TraceEntry(0, 50, 1)
    generated = {entry.tokens(seed, number, salt) for seed in (1, 2) for number in (0, 1) for salt in ("", "a")}
    assert len({each[:16] for each in generated}) == 8 and {len(each) for each in generated} == {50}
    assert TraceEntry(0, (4, 5), 1).tokens(1, 2, "a") == (4, 5)


def test_a_prompt_has_an_id_for_each_of_its_blocks() -> None:
    for num_tokens, needed in [(1, 1), (32, 1), (33, 2)]:
        PromptBlocks(num_tokens, tuple(range(needed)), SIZE)
        with pytest.raises(ValueError, match=f"{num_tokens} tokens are {needed} blocks of 32, but {needed + 1} are"):
            PromptBlocks(num_tokens, tuple(range(needed + 1)), SIZE)
