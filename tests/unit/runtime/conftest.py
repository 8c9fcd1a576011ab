"""Write a small random model directory by hand, so that these tests need no transformers, and load it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tandem.core.config import Bytes, EngineConfig, ModelConfig
from tandem.core.ids import BlockId, SeqId
from tandem.runtime.executor import BaseExecutor
from tandem.runtime.input_batch import Batch
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.model_config import read_model_config
from tandem.runtime.model_loader import AnyExecutor, load_executor
from tandem.sched.state.step_plan import ScheduledSlice
from tests.executor_logits import executor_logits

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


def load(directory: Path, model: ModelConfig | None = None, **engine: Any) -> AnyExecutor:
    """Load a model with one thread and a pool of 1 MiB, unless `engine` says otherwise."""
    settings = EngineConfig(**({"num_threads": 1, "kv_cache_memory": Bytes(1 << 20)} | engine))
    model = replace(model or ModelConfig(), cache_dir=str(directory / "cache"))
    return load_executor(directory, read_model_config(directory), model, settings)


def logits_of(executor: AnyExecutor) -> torch.Tensor:
    """The logits of a prompt of three tokens."""
    return executor_logits(executor, ScheduledSlice(SeqId(1), 0, 3, (4, 5, 6), (BlockId(0),), None))


def break_logits(patch: pytest.MonkeyPatch, executor: BaseExecutor) -> None:
    """Let a logit of each step's first row be no number."""
    logits = executor.model.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        rows = logits(hidden).clone()
        rows[0, 7] = float("nan")
        return rows

    patch.setattr(executor.model, "logits", broken)


def fail_at_token(patch: pytest.MonkeyPatch, executor: BaseExecutor, token: int) -> None:
    """Let each step fail that has the token."""
    forward = executor.model.forward

    def failing(batch: Batch, cache: KVCache) -> torch.Tensor:
        if token in batch.tokens.tolist():
            raise RuntimeError("no memory")
        return forward(batch, cache)

    patch.setattr(executor.model, "forward", failing)
