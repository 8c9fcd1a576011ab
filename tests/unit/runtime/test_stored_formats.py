"""Test that matrices in float8 are restored as their format defines them, and what of a format is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tandem.core.errors import TandemError
from tandem.runtime.architectures.stored_format import read_stored_format
from tandem.runtime.checkpoint import SINGLE_FILE, Checkpoint
from tests.stored_formats import COMPRESSED, FP8, quantise, restored

_NAME = "model.layers.0.mlp.down_proj.weight"


def _checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, folder / SINGLE_FILE)
    return Checkpoint(folder, torch.float32, stored=read_stored_format(config))


def _tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    weight = torch.randn(70, 100, generator=torch.Generator().manual_seed(1))
    numbers, scale = quantise(weight, config)
    stored = read_stored_format(config)
    assert stored is not None
    return {_NAME: numbers, _NAME + stored.scale: scale}


@pytest.mark.parametrize("config", [FP8, COMPRESSED], ids=["fp8", "compressed-tensors"])
def test_values_are_restored_from_their_bits(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = _tensors(config)
    numbers, scale = tensors.values()
    with _checkpoint(tmp_path, config, tensors) as checkpoint:
        got = checkpoint.take(_NAME, (70, 100))
        checkpoint.finish()
    assert torch.equal(got, restored(numbers, scale, config))
    with _checkpoint(tmp_path, config, tensors) as checkpoint:
        assert torch.equal(checkpoint.take(_NAME, (70, 100), range(10, 30), range(5, 90)), got[10:30, 5:90])


def test_one_scale_of_a_whole_matrix_and_a_matrix_without_scales(tmp_path: Path) -> None:
    numbers, _ = quantise(torch.ones(4, 8), COMPRESSED)
    tensors = {_NAME: numbers, f"{_NAME}_scale": torch.tensor(0.25), "model.norm.weight": torch.ones(8)}
    with _checkpoint(tmp_path, COMPRESSED, tensors) as checkpoint:
        assert torch.equal(checkpoint.take(_NAME, (4, 8)), torch.full((4, 8), 112.0))
        assert torch.equal(checkpoint.take("model.norm.weight", (8,)), torch.ones(8))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({f"{_NAME}_scale_inv": torch.ones(3, 2)}, r"down_proj\.weight: scales of shape \[3, 2\]"),
        ({f"{_NAME}_scale_inv": torch.full((3, 3), float("nan"))}, r"down_proj\.weight_scale_inv"),
        ({_NAME: torch.zeros(70, 100)}, "stored as torch.float32"),
        ({_NAME: torch.zeros(70, 99).to(torch.float8_e4m3fn)}, r"shape \[70, 99\]"),
    ],
)
def test_broken_tensors_are_named(tmp_path: Path, change: dict[str, torch.Tensor], named: str) -> None:
    with (
        _checkpoint(tmp_path, FP8, _tensors(FP8) | change) as checkpoint,
        pytest.raises(TandemError, match=named),
    ):
        checkpoint.take(_NAME, (70, 100))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        (FP8 | {"fmt": "e5m2"}, "e5m2"),
        (COMPRESSED | {"transform_config": {"R1": {}}}, "transform_config"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (COMPRESSED | {"format": "pack-quantized"}, "pack-quantized"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (COMPRESSED | {"config_groups": {}}, "config_groups"),
        (COMPRESSED | {"config_groups": {"a": {"weights": {"num_bits": 4}}}}, "num_bits=4"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(TandemError, match=named):
        read_stored_format(config)
