"""Conversations on pools and host memories that are too small for them, with files behind: token-identical to
transformers, also where new workers find the files of others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.core.events import Finished
from tandem.core.request import SamplingParams
from tests.covering import covering
from tests.golden.cluster import Cluster, Knobs, executors_for
from tests.golden.conftest import TinyModels
from tests.golden.models import Reference
from tests.golden.talks import LONGEST, NUM_OUTPUTS, turns_of

_GREEDY = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0)


@dataclass(frozen=True, slots=True)
class _Case:
    knobs: Knobs
    num_spare_slots: int

    def __str__(self) -> str:
        return f"{self.knobs}-spare{self.num_spare_slots}"


_PRODUCT = [
    _Case(Knobs(chunk=chunk, block_size=block_size, plan_depth=depth, remote=remote, company=company), num_spare_slots)
    for num_spare_slots, chunk, block_size, depth, remote, company in itertools.product(
        (-3, 0, 8), (16, None), (8, 16), (1, 2), (False, True), (False, True)
    )
    if not (remote and company)  # a worker refuses a second pull that it has no room for
]


def _check(reference: Reference, product: Sequence[_Case], directory: Path) -> None:
    """Run the conversations at one cluster, and their last turns at another that has only the files of the first."""
    turns = turns_of(reference)
    right = [[answer for _, answer in turn] for turn in turns]
    wrong = []
    for number, case in enumerate(product):
        files = directory / str(number)
        with _cluster(reference, case, files) as first:
            seen = [first.run_requests([prompt for prompt, _ in turn], _GREEDY) for turn in turns]
        with _cluster(reference, case, files) as second:
            again = second.run_requests([prompt for prompt, _ in turns[-1]], _GREEDY)
        ids = [[outcome.ids for outcome in outcomes] for outcomes in (*seen, again)]
        if ids != [*right, right[-1]]:
            wrong.append(str(case))
        assert second.producer.num_from_files > 0, f"nothing came from files under {case}"
        assert any(isinstance(o.end, Finished) and o.end.num_cached_tokens for o in again), f"no hit under {case}"
    assert not wrong, wrong


def _cluster(reference: Reference, case: _Case, files: Path) -> Cluster:
    """Room for the longest conversation and two blocks more, and in host memory for less or a little more."""
    num_blocks = -(-LONGEST // case.knobs.block_size) + 2
    num_host_slots = num_blocks + case.num_spare_slots
    executors = executors_for(reference, case.knobs, num_blocks, num_host_slots=num_host_slots)
    return Cluster(executors, case.knobs, files=files)


@pytest.mark.parametrize("case", covering(_PRODUCT), ids=str)
def test_float64_tokens_equal_transformers(tiny: TinyModels, case: _Case, tmp_path: Path) -> None:
    _check(tiny("llama", "float64"), [case], tmp_path)


def test_on_a_device_blocks_are_read_from_files_in_stream_order(tiny: TinyModels, tmp_path: Path) -> None:
    deep = Knobs(chunk=16, block_size=8, plan_depth=2, company=True, on_device=True)
    _check(tiny("llama", "float64"), [_Case(deep, 8)], tmp_path)


def test_compiled_kernels_read_blocks_of_files(tiny: TinyModels, tmp_path: Path) -> None:
    _check(tiny("llama", "float32"), [_Case(Knobs(chunk=16), 0), _Case(Knobs(remote=True), 8)], tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_float64_tokens_equal_transformers_over_the_product(tiny: TinyModels, tmp_path: Path) -> None:
    _check(tiny("qwen3", "float64"), _PRODUCT, tmp_path)
