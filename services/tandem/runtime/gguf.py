"""Convert a GGUF file into a model directory: weights, configuration and tokenizer.

Blocks of few bits are copied unchanged, under names that `runtime.architectures.stored_format` reads. Only models that
the decoder implements are converted. An unknown metadata key of the architecture is an error that names the key,
because a model converted without it could compute wrong tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize
from safetensors.torch import save_file

from tandem.core.errors import TandemError
from tandem.runtime.architectures.refusal import unsupported
from tandem.runtime.architectures.spec import RopeConfig
from tandem.runtime.architectures.stored_format import GGUF_FORMATS
from tandem.runtime.architectures.table import FAMILIES
from tandem.runtime.checkpoint import INDEX_FILE, SINGLE_FILE
from tandem.runtime.gguf_architectures import ARCHITECTURES, COMMON_FIELDS, COMMON_KEYS, TENSORS, GgufArchitecture
from tandem.runtime.gguf_tokenizer import tokenizer_files
from tandem.runtime.model_config import parse_model_config
from tandem.runtime.progress import ByteProgress, Progress
from tandem.runtime.rope_frequencies import inverse_frequencies

Array = np.ndarray[Any, Any]

_SHARD_BYTES = 1 << 30
_ROPE_FREQS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_NOT_WEIGHTS = (_ROPE_FREQS, _LONG_FACTORS, _SHORT_FACTORS)
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
    if (count := metadata.get("split.count", 1)) > 1:
        raise unsupported(f"{source} is one of {count} files of a model: join them with llama-gguf-split --merge")
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name not in _NOT_WEIGHTS}
    config = model_config(metadata, {tensor.name: tensor for tensor in reader.tensors})
    files = tokenizer_files(metadata)
    parse_model_config(config)
    for name, text in files.items():
        (target / name).write_text(text, encoding="utf-8")
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id") if config[name] is not None}
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", generation)
    weights = _weights(tensors, ARCHITECTURES[metadata["general.architecture"]], config)
    _write_weights(weights, target, ByteProgress("copying", sum(t.n_bytes for t in tensors.values()), progress))


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
    known = ARCHITECTURES.get(metadata.get("general.architecture", ""))
    if known is None:
        name = metadata.get("general.architecture")
        raise unsupported(f"GGUF architecture {name!r} (known: {', '.join(ARCHITECTURES)})")
    architecture = metadata["general.architecture"]
    own = {k.removeprefix(f"{architecture}."): v for k, v in metadata.items() if k.startswith(f"{architecture}.")}
    fields = COMMON_FIELDS | dict(known.fields)
    for key in sorted(own.keys() - fields.keys() - COMMON_KEYS):
        if own[key]:
            raise unsupported(f"GGUF key {architecture}.{key}={own[key]!r}")
    config: dict[str, Any] = {
        "model_type": known.model_type,
        "architectures": [FAMILIES[known.model_type].architecture],
    }
    config |= {name: _plain(own[key]) for key, name in fields.items() if key in own}
    head_dim = own.get("attention.key_length") or config["hidden_size"] // config["num_attention_heads"]
    if own.get("attention.value_length", head_dim) != head_dim:
        raise unsupported(
            f"GGUF key {architecture}.attention.value_length={own['attention.value_length']} with heads of {head_dim}"
        )
    rope = _rope(own, tensors, head_dim)
    rotated = own.get("rope.dimension_count") or head_dim
    if rotated != head_dim:
        if not known.can_rotate_part:
            raise unsupported(f"GGUF key {architecture}.rope.dimension_count={rotated} with heads of {head_dim}")
        rope["partial_rotary_factor"] = rotated / head_dim
    config |= {
        "hidden_act": "silu",
        "head_dim": head_dim,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "rms_norm_eps": _shortest(own["attention.layer_norm_rms_epsilon"]),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if known.model_type not in _BIAS_BY_FAMILY:
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config |= {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(metadata),
        "dtype": "float32",
        "quantization_config": {"quant_method": "gguf"},
    }
    if rope["rope_type"] == "longrope":
        # Where transformers looks for it.
        config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return config | dict(known.config)


_BIAS_BY_FAMILY = ("qwen2", "phi3")
"""Families whose config.json has no `attention_bias`."""


def _rope(own: Mapping[str, Any], tensors: Mapping[str, ReaderTensor], head_dim: int) -> dict[str, Any]:
    theta = _shortest(own.get("rope.freq_base", 10_000.0))
    kind = own.get("rope.scaling.type", "none")
    if _ROPE_FREQS in tensors:
        return _llama3(theta, dequantized(tensors[_ROPE_FREQS]), head_dim)
    if _LONG_FACTORS in tensors and _SHORT_FACTORS in tensors:
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "long_factor": _factors(tensors[_LONG_FACTORS]),
            "short_factor": _factors(tensors[_SHORT_FACTORS]),
            "attention_factor": _plain(own.get("rope.scaling.attn_factor")),
            "original_max_position_embeddings": own["rope.scaling.original_context_length"],
        }
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise unsupported(f"GGUF rope scaling {kind!r}")
    rope = {"rope_type": kind, "rope_theta": theta, "factor": own["rope.scaling.factor"]}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
    return rope


def _factors(tensor: ReaderTensor) -> list[float]:
    return [_shortest(value) for value in dequantized(tensor).tolist()]


def _llama3(theta: float, stored: Array, head_dim: int) -> dict[str, Any]:
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


def _weights(
    tensors: Mapping[str, ReaderTensor], architecture: GgufArchitecture, config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in tensors.values():
        kind, name = _rename(tensor.name, architecture.tensors)
        suffix, values = _values(tensor)
        if architecture.is_permuted and kind in heads:
            values = unpermuted(values, heads[kind])
        base, part = name.rsplit(".", 1)
        part += suffix
        if "{}" in base:
            yield from ((f"{base.format(number)}.{part}", _to_torch(each)) for number, each in enumerate(values))
        else:
            yield f"{base}.{part}", _to_torch(values)


def _values(tensor: ReaderTensor) -> tuple[str, Array]:
    """Return the rows of a tensor: blocks as bytes, with the suffix that marks them, or floats without one."""
    kind = tensor.tensor_type
    suffix = f"_{kind.name.lower()}"
    if suffix[1:] in GGUF_FORMATS:
        return suffix, tensor.data
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return "", tensor.data
    # Other kinds of blocks become floats; bfloat16 numbers are exact in float32.
    return "", dequantized(tensor)


def _to_torch(values: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(values, order="C"))


def _write_weights(weights: Iterator[tuple[str, torch.Tensor]], target: Path, progress: ByteProgress) -> None:
    """Write weights to files of about a gibibyte each, so that no more is in memory."""
    shards: list[list[str]] = []
    done = 0
    part: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        part[name] = tensor
        done += tensor.nbytes
        progress(tensor.nbytes)
        if sum(each.nbytes for each in part.values()) >= _SHARD_BYTES:
            shards.append(_write_shard(part, target, len(shards)))
            part = {}
    if part or not shards:
        shards.append(_write_shard(part, target, len(shards)))
    if len(shards) == 1:
        (target / _shard_name(0)).rename(target / SINGLE_FILE)
    else:
        weight_map = {name: _shard_name(number) for number, names in enumerate(shards) for name in names}
        _write_json(target / INDEX_FILE, {"metadata": {"total_size": done}, "weight_map": weight_map})


def _write_shard(part: Mapping[str, torch.Tensor], target: Path, number: int) -> list[str]:
    save_file(dict(part), target / _shard_name(number), metadata={"format": "pt"})
    return list(part)


def _shard_name(number: int) -> str:
    return f"model-{number + 1:05d}.safetensors"


def dequantized(tensor: ReaderTensor) -> Array:
    """Return the float32 values of a GGUF tensor, with its axes in torch's order."""
    return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def unpermuted(rows: Array, heads: int) -> Array:
    """Reorder the query or key rows of a Llama GGUF file to the order of Hugging Face checkpoints, and return them.

    `heads`: number of query or key heads in `rows`. In the file the two rows of a rotary pair are adjacent; in the
    result they are half a head apart."""
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _rename(name: str, layer_tensors: Mapping[str, str]) -> tuple[str, str]:
    """Return the GGUF kind of a tensor and its name in a Hugging Face checkpoint. Raises TandemError if unknown."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in TENSORS:
        return parts[0], f"{TENSORS[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in layer_tensors:
        return parts[2], f"model.layers.{parts[1]}.{layer_tensors[parts[2]]}.{parts[3]}"
    raise unsupported(f"GGUF tensor {name}")


def _plain(value: Any) -> Any:
    return _shortest(value) if isinstance(value, float) else value


def _shortest(value: float) -> float:
    """Return the shortest decimal number that rounds to the float32 `value`, which is the originally written one."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
