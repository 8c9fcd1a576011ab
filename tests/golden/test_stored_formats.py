"""Test models in float8 against transformers' run of the same weights in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.golden.conftest import TinyModels
from tests.golden.models import Kernels, check_greedy, random_prompt
from tests.golden.steps import generate
from tests.golden.stored_formats import write_quantised
from tests.stored_formats import COMPRESSED, FP8


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("config", [FP8, COMPRESSED], ids=["fp8", "compressed-tensors"])
@pytest.mark.parametrize("kernels", ["compiled", "reference"])
def test_tokens_equal_those_of_the_restored_weights(
    tiny: TinyModels, tmp_path: Path, name: str, config: dict[str, Any], kernels: Kernels
) -> None:
    stored, values = write_quantised(tiny(name, "float32"), tmp_path, config)
    prompts = [random_prompt(length, length) for length in (5, 40)]
    for prompt, tokens in zip(prompts, generate(stored.executor(kernels=kernels), prompts, 12, chunk=16), strict=True):
        check_greedy(values, prompt, tokens)
