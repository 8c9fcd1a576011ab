"""Write a random model whose steps take almost no time, so that the cost around a step can be measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

VOCABULARY = 256
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def make_tiny(directory: Path) -> Path:
    """Write a random Llama of two narrow layers, each of whose tokens is a word, to a directory; return its path."""
    directory.mkdir(parents=True)
    words = {f"w{token}": token for token in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    _write_model(directory, VOCABULARY, max_model_len=2048)
    return directory


def make_tiny_with_text_of(directory: Path, model: Path, max_model_len: int) -> Path:
    """Write a random Llama of two narrow layers with the tokenizer and the chat template of the model in `model` to a
    directory; return its path."""
    directory.mkdir(parents=True)
    for name in _TEXT_FILES:
        if (model / name).exists():
            shutil.copy(model / name, directory / name)
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size(with_added_tokens=True)
    _write_model(directory, vocabulary, max_model_len)
    return directory


def _write_model(directory: Path, vocabulary: int, max_model_len: int) -> None:
    hidden, inner, layers = 64, 128, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (hidden // 2, hidden) for name in "kv"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
    norms = [f"model.layers.{n}.{name}_layernorm" for n in range(layers) for name in ("input", "post_attention")]
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    weights |= {f"{name}.weight": torch.ones(hidden) for name in ("model.norm", *norms)}
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
