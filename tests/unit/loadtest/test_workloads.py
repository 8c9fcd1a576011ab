"""Workloads are functions of name, seed and turn, with the shapes that their names promise."""

from __future__ import annotations

from itertools import pairwise

import pytest

from loadtest.client.edit_prompts import passages
from loadtest.client.workloads import (
    MIX_RATE,
    NAMES,
    Workload,
    mix_workload,
    throughput_workload,
    warm_up,
    workload,
)
from tandem.workload.seeded_random import HIGHEST_TOKEN, LOWEST_TOKEN
from tandem.workload.source import built_in

BLOCK = 16


def by_letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def first_blocks(*workloads: Workload) -> list[tuple[int, ...]]:
    return [request.prompt[:BLOCK] for one in workloads for request in one.requests]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_name_seed_and_turn_give_the_same_requests(name: str) -> None:
    assert workload(name, 3, 1, by_letters) == workload(name, 3, 1, by_letters)


@pytest.mark.parametrize("name", NAMES)
def test_no_two_prompts_of_any_seed_or_turn_share_a_first_block(name: str) -> None:
    several = [workload(name, seed, turn, by_letters) for seed in (0, 1) for turn in (0, 1)]
    blocks = first_blocks(*several, warm_up(0), warm_up(1))
    assert len(set(blocks)) == len(blocks)


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_changes_tokens_but_neither_lengths_nor_arrivals(name: str) -> None:
    def shape(turn: int) -> list[tuple[str, str, int, int, float]]:
        requests = workload(name, 5, turn, by_letters).requests
        return [
            (request.name, request.group, len(request.prompt), request.max_tokens, request.due_s)
            for request in requests
        ]

    assert shape(0) == shape(1)
    assert workload(name, 5, 0, by_letters).requests[0].prompt != workload(name, 5, 1, by_letters).requests[0].prompt


@pytest.mark.parametrize(
    ("name", "count", "num_prompt", "num_output"),
    [
        ("decode", 5, 128, 64),
        ("prefill-128", 5, 128, 1),
        ("prefill-512", 5, 512, 1),
        ("prefill-2048", 3, 2048, 1),
        ("throughput", 32, 256, 64),
    ],
)
def test_fixed_shapes(name: str, count: int, num_prompt: int, num_output: int) -> None:
    one = workload(name, 0, 0, by_letters)
    assert [(len(request.prompt), request.max_tokens) for request in one.requests] == [(num_prompt, num_output)] * count
    assert one.is_sequential == (name != "throughput")
    assert all(LOWEST_TOKEN <= token < HIGHEST_TOKEN for request in one.requests for token in request.prompt)


@pytest.mark.parametrize("seed", range(5))
def test_the_mix_holds_its_classes(seed: int) -> None:
    requests = mix_workload(seed, 0, 24).requests
    ranges = {"short": (64, 200), "medium": (550, 650), "long": (2400, 2600)}
    counts = {group: sum(request.group == group for request in requests) for group in ranges}
    assert counts == {"short": 16, "medium": 5, "long": 3}
    assert all(ranges[request.group][0] <= len(request.prompt) <= ranges[request.group][1] for request in requests)
    assert all(32 <= request.max_tokens <= 64 for request in requests)


@pytest.mark.slow
def test_arrivals_of_the_mix_are_poisson_at_its_rate() -> None:
    gaps = []
    for seed in range(60):
        due = [request.due_s for request in mix_workload(seed, 0, 24, rate=0.35).requests]
        assert due == sorted(due) and due[0] == 0.0
        gaps += [after - before for before, after in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 0.35, rel=0.06)
    assert deviation == pytest.approx(mean, rel=0.1)  # as of an exponential distribution


def test_the_burst_is_the_mix_of_the_same_seed_all_at_once() -> None:
    mix, burst = workload("mix", 2, 0, by_letters), workload("mix-burst", 2, 0, by_letters)
    assert {request.due_s for request in burst.requests} == {0.0}
    assert sorted(request.group for request in burst.requests) == sorted(request.group for request in mix.requests)


def test_scale_keeps_the_shares_of_the_mix() -> None:
    groups = [request.group for request in workload("mix", 0, 0, by_letters, scale=2.0).requests]
    assert [groups.count(group) for group in ("short", "medium", "long")] == [32, 10, 6]
    assert len(workload("mix", 0, 0, by_letters, scale=0.05).requests) == 1


def test_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        workload("nothing", 0, 0, by_letters)


def test_an_edit_requests_a_text_that_is_in_its_prompt() -> None:
    texts = {passage.text.strip() for passage in passages()}
    for request in workload("edit", 1, 0, by_letters).requests:
        prompt = "".join(map(chr, request.prompt))
        (whole,) = [text for text in texts if text in prompt]
        assert prompt.endswith(whole[:20] + whole[20:60])


def test_throughput_is_all_at_once() -> None:
    one = throughput_workload(0, 0, 8)
    assert not one.is_sequential
    assert {request.due_s for request in one.requests} == {0.0}


def test_the_mix_of_a_bench_has_the_lengths_and_the_rate_of_the_mix_of_that_name() -> None:
    mix = built_in("mix")
    assert mix.rate == MIX_RATE
    prompts = {group.name: group.prompt for group in mix.groups}
    outputs = {group.output for group in mix.groups}
    assert prompts == {"short": (64, 200), "medium": (550, 650), "long": (2_400, 2_600)}
    assert outputs == {(32, 64)}
