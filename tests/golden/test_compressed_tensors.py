"""Test that matrices which the library compressed-tensors has written have the values that it restores itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import compress_module, decompress_module
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle import initialize_module_for_quantization
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

from tandem.runtime.architectures.quantization_config import read_stored_formats
from tandem.runtime.checkpoint import SINGLE_FILE, Checkpoint
from tandem_kernels.reference.coded import CodedMatrix

_ROWS, _COLUMNS = 256, 256
_SCHEMES = ("W4A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4")


def _extremes(weight: torch.Tensor, scheme: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the greatest weight of each group that shares a scale."""
    arguments = scheme.weights
    strategy = getattr(arguments.strategy, "value", arguments.strategy)
    if strategy == "tensor":
        return weight.min().view(1), weight.max().view(1)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if strategy == "block":
        rows, columns = arguments.block_structure
        blocks = weight.view(_ROWS // rows, rows, _COLUMNS // columns, columns)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.view(_ROWS, -1, arguments.group_size)
    return groups.amin(-1), groups.amax(-1)


def _quantised(name: str) -> tuple[torch.nn.Linear, Any]:
    """Return a random layer that the library has prepared for compression, and its scheme."""
    torch.manual_seed(1)
    layer, scheme = torch.nn.Linear(_COLUMNS, _ROWS, bias=False), preset_name_to_scheme(name, ["Linear"])
    initialize_module_for_quantization(layer, scheme)
    weight, options = layer.weight.data, {}
    if hasattr(layer, "weight_global_scale"):
        options["global_scale"] = generate_gparam(weight.min(), weight.max())
        layer.weight_global_scale.data.copy_(options["global_scale"])
    scale, _ = calculate_qparams(*_extremes(weight, scheme), scheme.weights, **options)
    layer.weight_scale.data.copy_(scale.view(layer.weight_scale.shape))
    scheme.format = infer_module_format(torch.nn.Linear, scheme)
    return layer, scheme


@pytest.mark.parametrize("name", _SCHEMES)
def test_values_are_those_of_the_library(tmp_path: Path, name: str) -> None:
    layer, scheme = _quantised(name)
    compress_module(layer)
    parts = {f"layer.{part}": tensor.clone().contiguous() for part, tensor in layer.state_dict().items()}
    save_file(parts, tmp_path / SINGLE_FILE)
    decompress_module(layer)
    theirs = layer.weight.data.float()
    config = {
        "quant_method": "compressed-tensors",
        "format": getattr(scheme.format, "value", scheme.format),
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    with Checkpoint(tmp_path, torch.float32, stored=read_stored_formats(config)) as checkpoint:
        got = checkpoint.take_stored("layer.weight", (_ROWS, _COLUMNS))
        checkpoint.drop(".input_scale")
        checkpoint.drop(".input_global_scale")
        checkpoint.finish()
    assert isinstance(got, CodedMatrix)
    # The library restores some formats in bfloat16.
    assert torch.equal(got.floats(), theirs) or torch.equal(got.floats().bfloat16(), theirs.bfloat16())
