"""Write a tiny model with its projections in few bits, beside one with the same values in float32."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.golden.models import Reference
from tests.stored_formats import WRITERS, quantise, restored

_MATRICES = ("_proj.weight",)


def write_quantised(plain: Reference, folder: Path, config: dict[str, Any]) -> tuple[Reference, Reference]:
    """Write a model with its projections in float8, and one with the same values in float32; return both."""
    suffix = "_scale_inv" if config["quant_method"] == "fp8" else "_scale"
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain.directory / "model.safetensors").items():
        stored[name] = values[name] = tensor
        if name.endswith(_MATRICES):
            stored[name], stored[name + suffix] = quantise(tensor, config)
            values[name] = restored(stored[name], stored[name + suffix], config)
            if config.get("activation_scheme") == "static":
                stored[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5)
                stored[name + suffix] = stored[name + suffix].squeeze()
                if name.endswith("k_proj.weight"):
                    stored[name.removesuffix("weight") + "k_scale"] = torch.tensor(0.5)
    return _write(plain, folder, stored, values, config)


def _write(
    plain: Reference,
    folder: Path,
    stored: dict[str, torch.Tensor],
    values: dict[str, torch.Tensor],
    config: dict[str, Any],
) -> tuple[Reference, Reference]:
    raw = json.loads((plain.directory / "config.json").read_text())
    for part, tensors, more in (("stored", stored, {"quantization_config": config}), ("values", values, {})):
        (folder / part).mkdir()
        save_file(tensors, folder / part / "model.safetensors", metadata={"format": "pt"})
        (folder / part / "config.json").write_text(json.dumps(raw | more))
    first, second = (Reference(folder / part, "float32", str(folder / "cache")) for part in ("stored", "values"))
    return first, second


def write_random(plain: Reference, folder: Path, name: str) -> tuple[Reference, Reference]:
    """Write a model whose projections are random matrices of a format, and one with the same values in float32."""
    config, matrix = WRITERS[name]
    source = random.Random(name)
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(plain.directory / "model.safetensors").items():
        stored[key] = values[key] = tensor
        if key.endswith(_MATRICES):
            del stored[key]
            parts, floats = matrix(source, *tensor.shape)
            stored |= {f"{key.removesuffix('weight')}{part}": each for part, each in parts.items()}
            values[key] = torch.tensor(floats)
    return _write(plain, folder, stored, values, config)
