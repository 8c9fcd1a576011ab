"""Write a small random model directory by hand, so that these tests need no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 3,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tensors() -> dict[str, torch.Tensor]:
    """Random float32 weights of `CONFIG` under their Hugging Face names."""
    source = torch.Generator().manual_seed(9)
    shapes = {"model.embed_tokens": (50, 32), "model.norm": (32,), "lm_head": (50, 32)}
    for i in range(2):
        prefix = f"model.layers.{i}."
        shapes |= {prefix + f"self_attn.{name}_proj": (32, 32) for name in "qo"}
        shapes |= {prefix + f"self_attn.{name}_proj": (16, 32) for name in "kv"}
        shapes |= {prefix + f"mlp.{name}_proj": (48, 32) for name in ("gate", "up")}
        shapes |= {prefix + "mlp.down_proj": (32, 48)}
        shapes |= {prefix + name: (32,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {f"{name}.weight": torch.randn(shape, generator=source) * 0.3 for name, shape in shapes.items()}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), directory / "model.safetensors")
    return directory
