"""Test tiny random models through the executor against transformers: fp32 logits close, fp64 tokens identical."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig

from tests.covering import covering
from tests.golden.conftest import TinyModels
from tests.golden.models import SHAPE, TINY, Kernels, make_random, random_prompts, teacher_forced
from tests.golden.steps import generate

_OUTPUTS = 10
# Lengths around block and chunk boundaries.
_PROMPTS = random_prompts((1, 5, 16, 33, 90))


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize("kernels", ["compiled", "reference"])
def test_logits_are_close_in_float32(tiny: TinyModels, name: str, kernels: Kernels) -> None:
    reference = tiny(name, "float32")
    tokens = _PROMPTS[-1]
    theirs = reference.logits(tokens)
    ours = teacher_forced(reference.executor(kernels=kernels), tokens)
    assert float(theirs.std()) > 0.5, "logits so flat would hide errors"
    torch.testing.assert_close(ours, theirs, atol=2e-5 * float(theirs.std()), rtol=2e-5)


def test_a_mixture_of_one_expert_is_computed(tmp_path: Path) -> None:
    config = MixtralConfig(**SHAPE, num_local_experts=1, num_experts_per_tok=1)
    reference, tokens = make_random(config, 1, tmp_path, "float32"), _PROMPTS[-1]
    theirs = reference.logits(tokens)
    ours = teacher_forced(reference.executor(kernels="compiled"), tokens)
    torch.testing.assert_close(ours, theirs, atol=2e-5 * float(theirs.std()), rtol=2e-5)


_CASES = list(
    itertools.product(sorted(TINY), (8, 16, 32), (3, 32, None), ("alone", "in company", "chained and staggered"))
)


def _check(tiny: TinyModels, name: str, block_size: int, chunk: int | None, company: str) -> None:
    reference = tiny(name, "float64")
    executor = reference.executor(block_size=block_size)
    if company == "alone":
        tokens = [generate(executor, [prompt], _OUTPUTS, chunk=chunk)[0] for prompt in _PROMPTS]
    elif company == "in company":
        tokens = generate(executor, _PROMPTS, _OUTPUTS, chunk=chunk)
    else:
        tokens = generate(executor, _PROMPTS, _OUTPUTS, chunk=chunk, chained=True, stagger=2)
    assert tokens == [reference.greedy(prompt, _OUTPUTS) for prompt in _PROMPTS], f"{block_size} {chunk} {company}"


@pytest.mark.parametrize(("name", "block_size", "chunk", "company"), covering(_CASES))
def test_tokens_are_identical_in_float64(
    tiny: TinyModels, name: str, block_size: int, chunk: int | None, company: str
) -> None:
    _check(tiny, name, block_size, chunk, company)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_tokens_are_identical_in_float64_over_the_product(tiny: TinyModels) -> None:
    for case in _CASES:
        _check(tiny, *case)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_follow_transformers(tiny: TinyModels, name: str, dtype: str) -> None:
    reference = tiny(name, dtype)
    tokens = _PROMPTS[-1]
    theirs = reference.logits(tokens).float()
    ours = teacher_forced(reference.executor(), tokens).float()
    tolerance = 0.15 if dtype == "bfloat16" else 0.02
    assert float((ours - theirs).abs().max()) < tolerance * float(theirs.std())
