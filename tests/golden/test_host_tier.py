"""Conversations that take turns on a pool that holds little more than one of them, with host memory behind it that has
too little room as well: token-identical to transformers, whatever was copied out and in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tandem.core.events import Finished
from tandem.core.request import SamplingParams
from tests.covering import covering
from tests.golden.cluster import Cluster, Knobs, Outcome, executors_for
from tests.golden.conftest import TinyModels
from tests.golden.models import Reference
from tests.golden.talks import LONGEST, NUM_OUTPUTS, OPENINGS, turns_of
from tests.golden.test_choices import Choices

_GREEDY = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0)
_SAMPLED = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.8, seed=11)


@dataclass(frozen=True, slots=True)
class _Case:
    knobs: Knobs
    num_host_slots: int

    def __str__(self) -> str:
        return f"{self.knobs}-host{self.num_host_slots}"


_PRODUCT = [
    _Case(Knobs(chunk=chunk, block_size=block_size, plan_depth=depth, remote=remote, company=company), num_host_slots)
    for num_host_slots, chunk, block_size, depth, remote, company in itertools.product(
        (1, 3, 8, 64), (16, None), (8, 16), (1, 2), (False, True), (False, True)
    )
    if not (remote and company)  # a worker refuses a second pull that it has no room for
]


def _cluster(reference: Reference, case: _Case, kind: type[Cluster] = Cluster) -> Cluster:
    """Room for the longest conversation and two blocks more."""
    num_blocks = -(-LONGEST // case.knobs.block_size) + 2
    executors = executors_for(reference, case.knobs, num_blocks, num_host_slots=case.num_host_slots)
    return kind(executors, case.knobs)


def _check(reference: Reference, product: Sequence[_Case]) -> None:
    turns = turns_of(reference)
    wrong = []
    for case in product:
        with _cluster(reference, case) as cluster:
            seen = [cluster.run_requests([prompt for prompt, _ in turn], _GREEDY) for turn in turns]
            right = [[answer for _, answer in turn] for turn in turns]
            if [[outcome.ids for outcome in outcomes] for outcomes in seen] != right:
                wrong.append(str(case))
            _check_copies(cluster, case, seen[-1])
    assert not wrong, wrong


def _check_copies(cluster: Cluster, case: _Case, last: Sequence[Outcome]) -> None:
    """Blocks went out; where there is room for all, they came back and count as cached."""
    assert cluster.producer.num_spilled > 0, f"nothing was copied out under {case}"
    if case.num_host_slots < 64 or case.knobs.company:
        return
    assert cluster.producer.num_filled > 0, f"nothing came back under {case}"
    ends = [outcome.end for outcome in last]
    assert all(isinstance(end, Finished) and end.num_cached_tokens >= 48 for end in ends), f"{ends} under {case}"
    if case.knobs.remote:
        assert cluster.consumer.num_filled > 0 and all(o.pulled and o.pulled.num_cached_tokens >= 48 for o in last)


@pytest.mark.parametrize("case", covering(_PRODUCT), ids=str)
def test_float64_tokens_equal_transformers(tiny: TinyModels, case: _Case) -> None:
    _check(tiny("llama", "float64"), [case])


def test_on_a_device_blocks_are_onloaded_in_stream_order(tiny: TinyModels) -> None:
    deep = Knobs(chunk=16, block_size=8, plan_depth=2, company=True, on_device=True)
    _check(tiny("llama", "float64"), [_Case(deep, 64), _Case(deep, 3)])


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_float64_tokens_equal_transformers_over_the_product(tiny: TinyModels) -> None:
    _check(tiny("qwen3", "float64"), _PRODUCT)


def test_compiled_kernels_read_onloaded_blocks(tiny: TinyModels) -> None:
    _check(tiny("llama", "float32"), [_Case(Knobs(chunk=16), 64), _Case(Knobs(remote=True), 3)])


@pytest.mark.parametrize("case", [_Case(Knobs(chunk=16), 64), _Case(Knobs(plan_depth=2, block_size=8), 16)], ids=str)
def test_choices_share_onloaded_blocks(tiny: TinyModels, case: _Case) -> None:
    """Four choices of each conversation, in turns, so that they fork from blocks of host memory and give way."""
    reference = tiny("llama", "float64")

    def run(case: _Case) -> tuple[list[list[int]], int]:
        with _cluster(reference, case, Choices) as cluster:
            assert isinstance(cluster, Choices)
            seen: list[list[int]] = []
            for prompt in OPENINGS * 2:
                outcomes = cluster.run_choices(prompt, _SAMPLED, range(4))
                cluster.run()
                seen += [outcome.ids for outcome in outcomes]
            return seen, cluster.consumer.num_filled

    right, _ = run(_Case(Knobs(), 0))
    seen, num_filled = run(case)
    assert seen == right and num_filled > 0
