"""Write tiny models as GGUF files, with the names that gguf's own tables give their tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

from tandem.runtime.gguf import convert
from tests.golden.models import TINY_VOCAB, Reference

Fields = dict[str, Any]


def _experts(writer: GGUFWriter, fields: Fields) -> None:
    writer.add_expert_count(fields.get("num_experts") or fields["num_local_experts"])
    writer.add_expert_used_count(fields["num_experts_per_tok"])
    if "moe_intermediate_size" in fields:
        writer.add_expert_feed_forward_length(fields["moe_intermediate_size"])


def _multipliers(writer: GGUFWriter, fields: Fields) -> None:
    writer.add_attention_scale(fields["attention_multiplier"])
    writer.add_embedding_scale(fields["embedding_multiplier"])
    writer.add_residual_scale(fields["residual_multiplier"])
    writer.add_logit_scale(fields["logits_scaling"])


MORE_KEYS: dict[str, Callable[[GGUFWriter, Fields], None]] = {
    "qwen3moe": _experts,
    "olmoe": _experts,
    "granite": _multipliers,
}
"""By architecture, what writes its own keys."""
_PERMUTED = ("llama", "granite")


def gguf_reference(
    plain: Reference,
    architecture: str,
    kind: GGMLQuantizationType,
    folder: Path,
    kind_of_values: GGMLQuantizationType | None = None,
) -> Reference:
    """Return a model whose directory has been converted from a GGUF file of another's weights, with matrices of `kind`
    where their rows are whole blocks. `kind_of_values`: another one for the projections to values."""
    fields = json.loads((plain.directory / "config.json").read_text())
    source, target = folder / "model.gguf", folder / "converted"
    writer = GGUFWriter(source, architecture)
    _write_keys(writer, fields)
    MORE_KEYS.get(architecture, lambda writer, fields: None)(writer, fields)
    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], fields["num_hidden_layers"])
    for name, tensor in _with_joined_experts(load_file(plain.directory / "model.safetensors")):
        values = tensor.float().numpy()
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name and architecture in _PERMUTED:
                values = _permuted(values, fields[heads])
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        if values.ndim > 1 and values.shape[-1] % 32 == 0 and "gate.weight" not in name:
            chosen = kind_of_values if kind_of_values is not None and "v_proj" in name else kind
            writer.add_tensor(found, quantize(values, chosen), raw_dtype=chosen)
        else:
            writer.add_tensor(found, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.mkdir()
    convert(source, target, lambda text: None)
    return Reference(target, "float32", str(folder / "cache"))


def _write_keys(writer: GGUFWriter, fields: Fields) -> None:
    rope = fields["rope_parameters"]
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1.0)))
    if "long_factor" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet())[: TINY_VOCAB - 1], "ab"])
    writer.add_token_types([1] * TINY_VOCAB)
    writer.add_token_merges(["a b"])


def _with_joined_experts(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors, with those of the experts of a layer as one."""
    experts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=_by_expert):
        parts = name.split(".experts.")
        if len(parts) == 1:
            yield name, tensors[name]
        else:
            experts.setdefault(f"{parts[0]}.experts.{parts[1].partition('.')[2]}", []).append(tensors[name])
    for name, matrices in experts.items():
        yield name, torch.stack(matrices)


def _by_expert(name: str) -> tuple[int, str]:
    number = name.partition(".experts.")[2].partition(".")[0]
    return (int(number) if number else -1), name


def _permuted(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Permute query and key rows as llama.cpp's converter does."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
