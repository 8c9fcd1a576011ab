"""Test models of GGUF files against transformers' run of the same weights in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from tandem.runtime.gguf_architectures import ARCHITECTURES
from tests.golden.conftest import TinyModels
from tests.golden.gguf_files import gguf_reference
from tests.golden.models import TINY, Kernels, Quantization, check_greedy, make_random, random_prompt, teacher_forced
from tests.golden.steps import generate

_TINY = {"llama": "llama-long"}
"""Tiny model of an architecture, where it is not named so."""
_TYPES = (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q5_1)


@pytest.mark.parametrize(
    ("architecture", "kind"), [(name, _TYPES[index % len(_TYPES)]) for index, name in enumerate(ARCHITECTURES)]
)
@pytest.mark.parametrize("kernels", ["compiled", "reference"])
def test_tokens_equal_those_of_transformers(
    tiny: TinyModels, tmp_path: Path, architecture: str, kind: GGMLQuantizationType, kernels: Kernels
) -> None:
    if architecture == "qwen3moe":
        # A file cannot say that some layers have no experts.
        config = TINY["qwen3-moe"]()
        config.mlp_only_layers = []
        plain = make_random(config, 5, tmp_path / "plain", "float32")
    else:
        plain = tiny(_TINY.get(architecture, architecture), "float32")
    model = gguf_reference(plain, architecture, kind, tmp_path)
    prompts = [random_prompt(length, length) for length in (5, 40)]
    for prompt, tokens in zip(prompts, generate(model.executor(kernels=kernels), prompts, 12, chunk=16), strict=True):
        check_greedy(model, prompt, tokens)


@pytest.mark.parametrize("kernels", ["compiled", "reference"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_values_may_have_a_type_of_their_own(
    tiny: TinyModels, tmp_path: Path, quantization: Quantization, kernels: Kernels
) -> None:
    """As in most files, beside biases: query, key and value are then three products."""
    plain = tiny("qwen2", "float32")
    model = gguf_reference(plain, "qwen2", GGMLQuantizationType.Q4_0, tmp_path, GGMLQuantizationType.Q8_0)
    prompt = random_prompt(40, 40)
    executor = model.executor(kernels=kernels, quantization=quantization)
    if quantization == "none":
        (tokens,) = generate(executor, [prompt], 12, chunk=16)
        check_greedy(model, prompt, tokens)
    else:
        theirs = model.logits(prompt)
        difference = (teacher_forced(executor, prompt) - theirs).abs().amax(dim=-1) / theirs.std()
        assert float(difference.median()) < 0.2
