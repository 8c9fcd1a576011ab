"""Test that recorded requests are read back unchanged, and without contents when a key is given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.lane import Lane
from tandem.workload.scheduled_request import ScheduledRequest
from tandem.workload.source import open_workload
from tandem.workload.tandem_trace import block_ids, entry_of, reader, trace_lines
from tandem.workload.trace_entry import PromptBlocks, TraceEntry
from tandem.workload.yaml_field import Field

KEY = bytes(range(16))
SIZE = 16


def read(lines: list[str]) -> list[TraceEntry]:
    header, *rest = [Field(f"line {number}", "", json.loads(line)) for number, line in enumerate(lines, start=1)]
    return [*map(reader(header), rest)]


def prompts() -> st.SearchStrategy[int | PromptBlocks | tuple[int, ...]]:
    def named(num_tokens: int) -> st.SearchStrategy[PromptBlocks]:
        needed = -(-num_tokens // SIZE)
        ids = st.lists(st.integers(0, 2**52 - 1), min_size=needed, max_size=needed)
        return ids.map(lambda found: PromptBlocks(num_tokens, tuple(found), SIZE))

    tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40).map(tuple)
    return st.integers(1, 10**7) | st.integers(1, 100).flatmap(named) | tokens


ENTRIES = st.builds(
    TraceEntry,
    due_us=st.integers(0, 10**13),
    prompt=prompts(),
    num_output_tokens=st.integers(1, 10**6),
    group=st.text(max_size=5),
    tenant=st.text(max_size=5),
    priority=st.integers(-5, 5),
    lane=st.sampled_from(Lane),
)


@given(st.lists(ENTRIES, max_size=6))
def test_entries_are_read_back_unchanged(entries: list[TraceEntry]) -> None:
    lines = list(trace_lines(entries, SIZE))
    assert not any("\n" in line for line in lines)
    assert read(lines) == entries


def requests(count: int) -> list[ScheduledRequest]:
    return list(open_workload("tenants", seed=3, count=count, rate=20.0))


def test_a_recorded_mix_replays_as_itself(tmp_path: Path) -> None:
    replayed = requests(40)
    path = tmp_path / "own.jsonl"
    entries = [entry_of(scheduled, scheduled.request.sampling.max_tokens, block_size=SIZE) for scheduled in replayed]
    path.write_text("\n".join(trace_lines(entries, SIZE)))
    again = list(open_workload(str(path), seed=3, count=40, rate=None))
    for one, other in zip(replayed, again, strict=True):
        assert other.due_s == pytest.approx(one.due_s - replayed[0].due_s, abs=2e-6)
        assert replace(other.request, id=one.request.id, sampling=one.request.sampling) == one.request
        assert other.request.sampling.max_tokens == one.request.sampling.max_tokens
        assert (other.group, other.tenant) == (one.group, one.tenant)


def test_with_a_key_no_token_is_recorded_and_replays_share_equal_blocks() -> None:
    replayed = requests(60)
    entries = [entry_of(scheduled, 5, block_size=SIZE, key=KEY) for scheduled in replayed]
    assert {entry.num_output_tokens for entry in entries} == {5}
    text = "\n".join(trace_lines(entries, SIZE))
    assert 'prompt_tokens":[' not in text
    again = [entry.tokens(1, number, "") for number, entry in enumerate(read(text.splitlines()))]
    prompts = [scheduled.request.prompt_tokens for scheduled in replayed]
    assert [len(prompt) for prompt in again] == [len(prompt) for prompt in prompts]
    num_shared = 0
    for i, one in enumerate(prompts):
        for j in range(i):
            shared = shared_blocks(one, prompts[j])
            assert shared_blocks(again[i], again[j]) == shared
            num_shared += shared
    assert num_shared > 0


def shared_blocks(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the number of full leading blocks that both share."""
    same = 0
    while same + SIZE <= min(len(one), len(other)) and one[same : same + SIZE] == other[same : same + SIZE]:
        same += SIZE
    return same // SIZE


def test_an_id_covers_its_block_all_before_it_and_the_key() -> None:
    usual = list(block_ids(range(40), SIZE, KEY))
    assert len(usual) == 3 and all(0 <= each < 2**52 for each in usual)
    assert list(block_ids([99, *range(1, 40)], SIZE, KEY))[1] != usual[1]
    assert list(block_ids([*range(39), 99], SIZE, KEY))[:2] == usual[:2]
    assert not set(block_ids(range(40), SIZE, bytes(16))) & set(usual)
    with pytest.raises(ValueError, match="16 to 64 bytes, got 0"):
        list(block_ids(range(40), SIZE, b""))


def test_blocks_of_another_size_are_not_written() -> None:
    with pytest.raises(ValueError, match="blocks of 16 tokens in a file of blocks of 64"):
        list(trace_lines([TraceEntry(0, PromptBlocks(3, (1,), 16), 1)], 64))
