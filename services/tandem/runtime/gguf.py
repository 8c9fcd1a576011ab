"""Convert a GGUF file into a model directory: dequantised weights, configuration and tokenizer.

Only models that the decoder implements are converted. An unknown metadata key of the architecture is an error that
names it, for the same reason as an unknown field of config.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors.torch import save_file

from tandem.core.errors import TandemError
from tandem.runtime.architectures.refusal import unsupported
from tandem.runtime.architectures.spec import RopeConfig
from tandem.runtime.checkpoint import SINGLE_FILE
from tandem.runtime.gguf_tokenizer import tokenizer_files
from tandem.runtime.model_config import parse_model_config
from tandem.runtime.rope_frequencies import inverse_frequencies

Progress = Callable[[str], None]

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
}
_OTHER_KEYS = frozenset(
    {
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "vocab_size",
    }
)
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Scaling factors of Llama 3.1 and 3.2; the file stores only the resulting frequencies.
_LLAMA3_FACTORS = (8.0, 32.0)


def convert(source: Path, target: Path, progress: Progress) -> None:
    """Write the model in the GGUF file `source` to the existing directory `target`: weights, config, tokenizer.

    `progress` is called with a short text about each stage. Raises TandemError when the file is unreadable or the model
    unsupported; `target` may then hold some of the files."""
    try:
        _convert(source, target, progress)
    except TandemError:
        raise
    except KeyError as error:
        raise unsupported(f"{source} lacks the key {error}") from None
    except Exception as error:  # the reader and the tokenizer raise all kinds of exceptions for a broken file
        raise unsupported(f"{source} is not a readable GGUF file: {error!r}") from error


def _convert(source: Path, target: Path, progress: Progress) -> None:
    reader = _reader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(metadata, {tensor.name: tensor for tensor in reader.tensors})
    files = tokenizer_files(metadata)
    parse_model_config(config)
    for name, text in files.items():
        (target / name).write_text(text, encoding="utf-8")
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id") if config[name] is not None}
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", generation)
    weights = dict(_weights(reader, config, progress))
    progress(f"writing {sum(tensor.nbytes for tensor in weights.values()) >> 20} MiB")
    save_file(weights, target / SINGLE_FILE, metadata={"format": "pt"})


class _Reader(GGUFReader):  # type: ignore[misc]  # has no types
    """Reader of a GGUF file that raises ValueError where the file ends within a value. GGUFReader itself would read
    nothing there, for each of the 2**48 numbers of a list that a file of 100 bytes may announce."""

    def _get(self, offset: int, dtype: Any, count: int = 1, *options: Any, **more: Any) -> Any:
        found = super()._get(offset, dtype, count, *options, **more)
        if len(found) < count:
            raise ValueError(f"it ends within the value at byte {offset}")
        return found


def _reader(source: Path) -> GGUFReader:
    try:
        return _Reader(source)
    except KeyError as error:
        raise unsupported(f"{source} is not a readable GGUF file: {error}") from None


def model_config(metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> dict[str, Any]:
    """Return the content of the config.json of the model that a GGUF file describes.

    `metadata`: the file's keys and values. `tensors`: its tensors by name. Raises TandemError for an unsupported model,
    and KeyError when a key is missing."""
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise unsupported(f"GGUF architecture {architecture!r} (known: {', '.join(_ARCHITECTURES)})")
    own = {k.removeprefix(f"{architecture}."): v for k, v in metadata.items() if k.startswith(f"{architecture}.")}
    for key in sorted(own.keys() - _SIZES.keys() - _OTHER_KEYS):
        if own[key]:
            raise unsupported(f"GGUF key {architecture}.{key}={own[key]!r}")
    config: dict[str, Any] = {"model_type": architecture, "architectures": [_ARCHITECTURES[architecture]]}
    config |= {field: own[key] for key, field in _SIZES.items() if key in own}
    head_dim = own.get("attention.key_length") or config["hidden_size"] // config["num_attention_heads"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise unsupported(f"GGUF key {architecture}.{key}={own[key]} with heads of {head_dim}")
    return config | {
        "hidden_act": "silu",
        "head_dim": head_dim,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "rms_norm_eps": _shortest(own["attention.layer_norm_rms_epsilon"]),
        "rope_parameters": _rope(own, tensors, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(metadata),
        "dtype": "float32",
    }


def _rope(own: Mapping[str, Any], tensors: Mapping[str, ReaderTensor], head_dim: int) -> dict[str, Any]:
    theta = _shortest(own.get("rope.freq_base", 10_000.0))
    kind = own.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        return _llama3(theta, dequantized(tensors["rope_freqs.weight"]), head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise unsupported(f"GGUF rope scaling {kind!r}")
    rope = {"rope_type": kind, "rope_theta": theta, "factor": own["rope.scaling.factor"]}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
    return rope


def _llama3(theta: float, stored: np.ndarray[Any, Any], head_dim: int) -> dict[str, Any]:
    """Find the Llama 3 scaling that divides each unscaled frequency by `stored`. Raises TandemError if none does."""
    plain, _ = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    for factor in _LLAMA3_FACTORS:
        rope = RopeConfig(
            theta=theta, kind="llama3", factor=factor, original_length=8192, low_freq_factor=1.0, high_freq_factor=4.0
        )
        scaled, _ = inverse_frequencies(rope, head_dim)
        if np.allclose((plain / scaled).numpy(), stored, rtol=1e-4):
            return {
                "rope_type": rope.kind,
                "rope_theta": theta,
                "factor": factor,
                "original_max_position_embeddings": rope.original_length,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
            }
    raise unsupported("GGUF tensor rope_freqs.weight with frequencies of an unknown scaling")


def _eos(metadata: Mapping[str, Any]) -> int | list[int] | None:
    """Return the token ids that end a turn; a file names end of text, end of turn and end of message separately."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata[f"tokenizer.ggml.{name}"] for name in names if f"tokenizer.ggml.{name}" in metadata]
    unique = sorted(set(ids))
    return unique[0] if len(unique) == 1 else unique or None


def _weights(reader: GGUFReader, config: Mapping[str, Any], progress: Progress) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = [tensor for tensor in reader.tensors if tensor.name != "rope_freqs.weight"]
    for done, tensor in enumerate(tensors, 1):
        kind, name = _rename(tensor.name)
        values = dequantized(tensor)
        if config["model_type"] == "llama" and kind in heads:
            values = unpermuted(values, heads[kind])
        yield name, torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
        if done % 16 == 0 or done == len(tensors):
            progress(f"dequantising {done}/{len(tensors)} tensors")


def dequantized(tensor: ReaderTensor) -> np.ndarray[Any, Any]:
    """Return the float32 values of a GGUF tensor, with its axes in torch's order."""
    return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def unpermuted(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder the query or key rows of a Llama GGUF file to the order of Hugging Face checkpoints, and return them.

    `heads`: number of query or key heads in `rows`. In the file the two rows of a rotary pair are adjacent; in the
    result they are half a head apart."""
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _rename(name: str) -> tuple[str, str]:
    """Return the GGUF kind of a tensor and its name in a Hugging Face checkpoint. Raises TandemError if unknown."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _TENSORS:
        return parts[0], f"{_TENSORS[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS:
        return parts[2], f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.{parts[3]}"
    raise unsupported(f"GGUF tensor {name}")


def _shortest(value: float) -> float:
    """Return the shortest decimal number that rounds to the float32 `value`, which is the originally written one."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
