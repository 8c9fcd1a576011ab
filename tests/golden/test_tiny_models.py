"""Tiny random models through the executor against transformers: fp32 logits close, fp64 tokens identical."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.golden.conftest import TinyModels
from tests.golden.models import TINY, TINY_VOCAB, Kernels, teacher_forced
from tests.golden.steps import generate

_OUTPUTS = 10


def _prompts() -> list[list[int]]:
    """Lengths around block and chunk boundaries."""
    source = random.Random(7)
    return [[source.randrange(TINY_VOCAB) for _ in range(length)] for length in (1, 5, 16, 33, 90)]


@pytest.fixture(scope="module")
def expected(tiny: TinyModels) -> Callable[[str], list[list[int]]]:
    """What transformers generates in float64, by model."""

    @cache
    def generate_all(name: str) -> list[list[int]]:
        return [tiny(name, "float64").greedy(prompt, _OUTPUTS) for prompt in _prompts()]

    return generate_all


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize("kernels", ["compiled", "reference"])
def test_logits_are_close_in_float32(tiny: TinyModels, name: str, kernels: Kernels) -> None:
    reference = tiny(name, "float32")
    tokens = _prompts()[-1]
    theirs = reference.logits(tokens)
    ours = teacher_forced(reference.executor(kernels=kernels), tokens)
    assert float(theirs.std()) > 0.5, "logits so flat would hide errors"
    torch.testing.assert_close(ours, theirs, atol=2e-5 * float(theirs.std()), rtol=2e-5)


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_tokens_are_identical_in_float64(
    tiny: TinyModels, expected: Callable[[str], list[list[int]]], name: str, block_size: int
) -> None:
    reference, tokens = tiny(name, "float64"), expected(name)
    executor = reference.executor(block_size=block_size)
    for chunk in (3, 32, None):
        assert generate(executor, _prompts(), _OUTPUTS, chunk=chunk) == tokens, f"in company, chunk {chunk}"
        staggered = generate(executor, _prompts(), _OUTPUTS, chunk=chunk, chained=True, stagger=2)
        assert staggered == tokens, f"chained and staggered, chunk {chunk}"
    alone = [generate(executor, [prompt], _OUTPUTS)[0] for prompt in _prompts()]
    assert alone == tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_follow_transformers(tiny: TinyModels, dtype: str) -> None:
    reference = tiny("qwen3", dtype)
    tokens = _prompts()[-1]
    theirs = reference.logits(tokens).float()
    ours = teacher_forced(reference.executor(), tokens).float()
    tolerance = 0.15 if dtype == "bfloat16" else 0.02
    assert float((ours - theirs).abs().max()) < tolerance * float(theirs.std())
