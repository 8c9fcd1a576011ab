"""Write a tiny model a second time with its projections in float8, beside one with the same values in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.golden.models import Reference
from tests.stored_formats import quantise, restored

_MATRICES = ("_proj.weight",)


def write_quantised(plain: Reference, folder: Path, config: dict[str, Any]) -> tuple[Reference, Reference]:
    """Write a model with its projections in float8, and one with the same values in float32; return both."""
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
    first, second = (Reference(folder / part, "float32", str(folder / "cache")) for part in ("stored", "values"))
    return first, second
