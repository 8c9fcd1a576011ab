"""Test the assignment of GPUs and cores to the workers of a machine: all fit, and prefill workers use idle cores."""

from __future__ import annotations

import os

import pytest

from tandem.cli.resource_assignment import gpu_share, threads_by_pool
from tandem.core.errors import ErrorKind, TandemError


@pytest.mark.parametrize(
    ("num_workers", "num_gpus", "num_together"),
    [(1, 1, 1), (2, 1, 2), (3, 1, 3), (2, 2, 1), (3, 2, 2), (7, 2, 4), (2, 8, 1)],
)
def test_workers_of_one_gpu_share_it(num_workers: int, num_gpus: int, num_together: int) -> None:
    share, utilization = gpu_share(num_workers, num_gpus, 0.9)
    assert utilization * num_together == pytest.approx(0.9)
    assert 1 - num_together * 1e-4 <= share * num_together <= 1
    assert int(1 / share) * num_gpus >= num_workers, "Ray finds a place for each"


def test_without_a_gpu() -> None:
    with pytest.raises(TandemError, match="no GPU") as refused:
        gpu_share(2, 0, 0.9)
    assert (refused.value.kind, refused.value.param) == (ErrorKind.UNSUPPORTED, "device")


def test_ranks_have_a_gpu_each() -> None:
    assert gpu_share(2, 8, 0.9, num_ranks=4) == (1.0, 0.9)
    with pytest.raises(TandemError, match="need 8 GPUs, and this machine has 7") as refused:
        gpu_share(2, 7, 0.9, num_ranks=4)
    assert (refused.value.kind, refused.value.param) == (ErrorKind.UNSUPPORTED, "tensor_parallel")


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
