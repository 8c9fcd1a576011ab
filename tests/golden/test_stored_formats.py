"""Test models in float8 against transformers' run of the same weights in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.golden.conftest import TinyModels
from tests.golden.models import Kernels, Reference, check_greedy, random_prompt
from tests.golden.steps import generate
from tests.stored_formats import COMPRESSED, FP8, quantise, restored

_MATRICES = ("_proj.weight",)


def _quantised(plain: Reference, folder: Path, config: dict[str, Any]) -> tuple[Reference, Reference]:
    """Write a model with its projections in float8 and the same values in float32; return both."""
    suffix = "_scale_inv" if config.get("weight_block_size") else "_scale"
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain.directory / "model.safetensors").items():
        stored[name] = values[name] = tensor
        if name.endswith(_MATRICES):
            stored[name], stored[name + suffix] = quantise(tensor, config)
            values[name] = restored(stored[name], stored[name + suffix], config)
    raw = json.loads((plain.directory / "config.json").read_text())
    for part, tensors, more in (("stored", stored, {"quantization_config": config}), ("values", values, {})):
        (folder / part).mkdir()
        save_file(tensors, folder / part / "model.safetensors", metadata={"format": "pt"})
        (folder / part / "config.json").write_text(json.dumps(raw | more))
    return tuple(Reference(folder / part, "float32", str(folder / "cache")) for part in ("stored", "values"))


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("config", [FP8, COMPRESSED], ids=["fp8", "compressed-tensors"])
@pytest.mark.parametrize("kernels", ["compiled", "reference"])
def test_tokens_equal_those_of_the_restored_weights(
    tiny: TinyModels, tmp_path: Path, name: str, config: dict[str, Any], kernels: Kernels
) -> None:
    stored, values = _quantised(tiny(name, "float32"), tmp_path, config)
    prompts = [random_prompt(length, length) for length in (5, 40)]
    for prompt, tokens in zip(prompts, generate(stored.executor(kernels=kernels), prompts, 12, chunk=16), strict=True):
        check_greedy(values, prompt, tokens)
