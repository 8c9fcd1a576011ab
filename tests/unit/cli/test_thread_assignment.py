"""Test the assignment of cores to the workers of a machine, including idle cores for prefill workers."""

from __future__ import annotations

import os

import pytest

from tandem.cli.thread_assignment import threads_by_pool


@pytest.mark.parametrize(
    ("num_cores", "pools", "expected"),
    [
        (2, {"mixed": 1}, {"mixed": 2}),
        (2, {"prefill": 1, "decode": 1}, {"prefill": 2, "decode": 1}),
        (8, {"prefill": 2, "decode": 2}, {"prefill": 4, "decode": 2}),
        (8, {"prefill": 1, "decode": 2, "mixed": 1}, {"prefill": 8, "decode": 2, "mixed": 2}),
        (1, {"prefill": 3, "mixed": 3}, {"prefill": 1, "mixed": 1}),
    ],
)
def test_shares(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, pools: dict[str, int], expected: dict[str, int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    assert threads_by_pool(pools) == expected
    assert threads_by_pool(pools, num_threads=3) == dict.fromkeys(pools, 3)
