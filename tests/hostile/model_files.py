"""Fuzz targets: the files of a model: GGUF, safetensors with its index, and config.json."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from gguf import GGUFWriter
from safetensors.torch import save
from tokenizers import pre_tokenizers

from tandem.runtime.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from tandem.runtime.gguf import convert
from tandem.runtime.model_config import read_model_config
from tests.hostile.surface import Surface

_MEMORY = Path("/dev/shm")
_NAMES = {"a": (2, 3), "b": (4,)}
_HIDDEN, _HEADS = 8, 2


@contextmanager
def _folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="tandem-fuzz-", dir=_MEMORY if _MEMORY.is_dir() else None) as name:
        yield Path(name)


def _read_gguf(data: bytes) -> None:
    with _folder() as folder:
        (folder / "m.gguf").write_bytes(data)
        (folder / "target").mkdir()
        convert(folder / "m.gguf", folder / "target", lambda text: None)


def _read_safetensors(data: bytes) -> None:
    """Read bytes as a file of weights or, where the first byte is a brace, as the index of several such files."""
    with _folder() as folder:
        (folder / (INDEX_FILE if data[:1] == b"{" else SINGLE_FILE)).write_bytes(data)
        if data[:1] == b"{":
            (folder / SINGLE_FILE).write_bytes(_WEIGHTS)
        with Checkpoint(folder, torch.float32) as checkpoint:
            for name, shape in _NAMES.items():
                checkpoint.take(name, shape)
            checkpoint.finish()


def _read_config(data: bytes) -> None:
    with _folder() as folder:
        (folder / "config.json").write_bytes(data)
        read_model_config(folder)


@cache
def _gguf() -> bytes:
    """Return a whole model of one layer with eight numbers per token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", *letters, "ab"]
    with _folder() as folder:
        writer = GGUFWriter(folder / "m.gguf", "llama")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(_HIDDEN)
        writer.add_feed_forward_length(_HIDDEN)
        writer.add_head_count(_HEADS)
        writer.add_head_count_kv(_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([3, *[1] * (len(tokens) - 1)])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(0)
        square = torch.zeros(_HIDDEN, _HIDDEN).numpy()
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down", "ffn_gate"):
            writer.add_tensor(f"blk.0.{name}.weight", square)
        for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
            writer.add_tensor(f"{name}.weight", square[0])
        writer.add_tensor("token_embd.weight", torch.zeros(len(tokens), _HIDDEN).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (folder / "m.gguf").read_bytes()


_ENDLESS = b"GGUF" + struct.pack("<IQQQsIIQ", 3, 0, 1, 1, b"a", 9, 4, 2**48)
"""The reader never came to the end of a list of 2**48 numbers."""
_WEIGHTS = save({name: torch.zeros(shape) for name, shape in _NAMES.items()})
_INDEX = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(_NAMES, SINGLE_FILE)}).encode()
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": [1, 2],
    "torch_dtype": "float32",
}
_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SURFACES = {
    "gguf": Surface(read=_read_gguf, seeds=(_gguf(),), found=(_ENDLESS,)),
    "safetensors": Surface(
        read=_read_safetensors,
        seeds=(_WEIGHTS, _INDEX),
        found=(
            b'{"weight_map": {"a": [1]}}',
            b'{"weight_map": {"a": "%b"}}' % (b"m" * 300),
            b'{"weight_map": ' + b"[" * 100_000,
        ),
    ),
    "model-config": Surface(
        read=_read_config,
        seeds=(
            json.dumps(_CONFIG).encode(),
            json.dumps({**_CONFIG, "rope_scaling": _SCALING}).encode(),
            json.dumps({**_CONFIG, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}).encode(),
        ),
        found=(
            b'{"model_type": {}}',
            json.dumps({**_CONFIG, "rope_theta": "x"}).encode(),
            json.dumps({**_CONFIG, "rope_scaling": [1]}).encode(),
            json.dumps({**_CONFIG, "eos_token_id": [[]]}).encode(),
            json.dumps({**_CONFIG, "rope_scaling": {**_SCALING, "rope_type": []}}).encode(),
            b"[" * 5_000,
            b'{"vocab_size": ' + b"9" * 5_000 + b"}",
        ),
    ),
}
