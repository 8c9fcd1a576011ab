"""Test that handoffs between workers of different tensor-parallel degrees give the tokens of one single-rank worker."""

from __future__ import annotations

import itertools
import random

import pytest

from tandem.core.request import SamplingParams
from tests.covering import covering
from tests.golden.cluster import Cluster, Knobs
from tests.golden.conftest import TinyModels
from tests.golden.models import TINY_VOCAB

_OUTPUTS = 12
_GREEDY = SamplingParams(max_tokens=_OUTPUTS, temperature=0.0)
_PROMPTS = [random.Random(length).choices(range(TINY_VOCAB), k=length) for length in (3, 41, 96)]
_DEGREES = [(1, 2), (2, 1), (2, 2)]
_PRODUCT = [
    (degrees, Knobs(remote=True, chunk=chunk, block_size=block_size, prefix_hit=hit, company=company))
    for degrees, chunk, block_size, hit, company in itertools.product(
        _DEGREES, (16, 64, None), (8, 16), (False, True), (False, True)
    )
]
_SOME = covering(_PRODUCT)


def check(tiny: TinyModels, model: str, degrees: tuple[int, int], knobs: Knobs) -> None:
    reference = tiny(model, "float64")
    executors = [reference.executor(block_size=knobs.block_size) for _ in degrees]
    with Cluster(executors, knobs, num_ranks=degrees) as cluster:
        outcomes = cluster.run_requests(_PROMPTS, _GREEDY)
    assert [outcome.ids for outcome in outcomes] == [reference.greedy(each, _OUTPUTS) for each in _PROMPTS]
    num_blocks = [-(-len(each) // knobs.block_size) for each in _PROMPTS]
    pulled = [outcome.pulled.num_blocks for outcome in outcomes if outcome.pulled is not None]
    assert pulled == num_blocks or (knobs.prefix_hit and all(map(int.__le__, pulled, num_blocks)))


@pytest.mark.parametrize(("degrees", "knobs"), _SOME, ids=[f"{g}to{t}-{knobs}" for (g, t), knobs in _SOME])
def test_tokens_are_those_of_transformers(tiny: TinyModels, degrees: tuple[int, int], knobs: Knobs) -> None:
    check(tiny, "llama", degrees, knobs)


@pytest.mark.parametrize("degrees", _DEGREES)
def test_over_nixl_too(tiny: TinyModels, degrees: tuple[int, int]) -> None:
    check(tiny, "qwen3", degrees, Knobs(remote=True, chunk=16, transport="nixl"))


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(("degrees", "knobs"), _PRODUCT, ids=[f"{g}to{t}-{knobs}" for (g, t), knobs in _PRODUCT])
def test_the_full_product(tiny: TinyModels, degrees: tuple[int, int], knobs: Knobs, model: str) -> None:
    check(tiny, model, degrees, knobs)
