"""Write a model directory whose weights are floats, for programs that do not read the blocks of a GGUF file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors import safe_open
from safetensors.torch import save_file

from tandem.runtime.architectures.stored_format import GGUF_FORMATS
from tandem.runtime.atomic_dir import build_once
from tandem.runtime.checkpoint import SINGLE_FILE, weight_files

_MARK = ".weight_"
_WITH_PADDING = ("phi3", "glm4")
"""Families for which transformers assumes a padding token that a vocabulary may lack."""


def float_copy(directory: Path) -> Path:
    """Return a model directory with the same weights in float32: the directory itself, or a copy beside it if it has
    been made from a GGUF file. The copy is made once."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization_config") != {"quant_method": "gguf"}:
        return directory
    return build_once(directory.with_name(f"{directory.name}-floats"), lambda target: _write(directory, target))


def _write(directory: Path, target: Path) -> None:
    for path in [*directory.glob("*.json"), *directory.glob("*.jinja")]:
        shutil.copy(path, target)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    if config["model_type"] in _WITH_PADDING:
        config["pad_token_id"] = None
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # not a dictionary
                base, mark, kind = name.partition(_MARK)
                tensor = stored.get_tensor(name)
                tensors[f"{base}.weight" if mark else name] = _floats(tensor, kind) if mark else tensor.float()
    save_file(tensors, target / SINGLE_FILE, metadata={"format": "pt"})


def _floats(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the float32 values of rows of blocks of a type."""
    form = GGUF_FORMATS[kind]
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    matrix = form.read({form.suffixes[0]: blocks}, (len(blocks), blocks.shape[1] // num_bytes * size))
    return matrix if isinstance(matrix, torch.Tensor) else matrix.floats()
