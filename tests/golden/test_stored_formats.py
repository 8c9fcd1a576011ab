"""Test models in few bits against transformers' run of the same weights in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.golden.conftest import TinyModels
from tests.golden.models import TINY, Kernels, Reference, check_greedy, make_random, random_prompt, teacher_forced
from tests.golden.steps import generate
from tests.golden.stored_formats import write_quantised, write_random
from tests.stored_formats import COMPRESSED, FP8, FP8_MATRIX, WRITERS


def _check(stored: Reference, values: Reference, kernels: Kernels) -> None:
    prompts = [random_prompt(length, length) for length in (5, 40)]
    for prompt, tokens in zip(prompts, generate(stored.executor(kernels=kernels), prompts, 12, chunk=16), strict=True):
        check_greedy(values, prompt, tokens)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("config", [FP8, FP8_MATRIX, COMPRESSED], ids=["fp8", "fp8-matrix", "compressed-tensors"])
@pytest.mark.parametrize("kernels", ["compiled", "reference"])
def test_tokens_equal_those_of_the_restored_weights(
    tiny: TinyModels, tmp_path: Path, name: str, config: dict[str, Any], kernels: Kernels
) -> None:
    _check(*write_quantised(tiny(name, "float32"), tmp_path, config), kernels)


@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kernels", ["compiled", "reference"])
def test_tokens_of_random_weights(tiny: TinyModels, tmp_path: Path, model: str, name: str, kernels: Kernels) -> None:
    _check(*write_random(tiny(model, "float32"), tmp_path, name), kernels)


@pytest.mark.parametrize(("model", "name"), [("qwen3-moe", "awq"), ("qwen3-moe", "fp8"), ("mixtral", "int8")])
def test_int8_of_experts_is_the_plain_meaning(tmp_path: Path, model: str, name: str) -> None:
    """Experts that are integers stay in their bits, others are rounded; compiled kernels and plain ones agree. Those
    of the last model are wider than its rows, and there is no other MLP."""
    config = TINY[model]()
    if model == "qwen3-moe":
        config.moe_intermediate_size = 64
    plain = make_random(config, 5, tmp_path / "plain", "float32")
    stored, _ = write_quantised(plain, tmp_path, FP8) if name == "fp8" else write_random(plain, tmp_path, name)
    tokens = random_prompt(60, 3)
    ours, theirs = (
        teacher_forced(stored.executor(kernels=kernels, quantization="int8"), tokens)
        for kernels in ("compiled", "reference")
    )
    difference = (ours - theirs).abs().amax(dim=-1) / theirs.std()
    assert float(difference[0]) < 1e-5
    assert float(difference.median()) < 0.1
