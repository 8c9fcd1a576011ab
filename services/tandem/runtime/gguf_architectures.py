"""List the GGUF architectures that can be converted: their fields in config.json, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Keys of a file below its architecture's name, and the fields of config.json that they become.
COMMON_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
}
# Keys that the conversion reads by itself.
COMMON_KEYS = frozenset(
    {
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "vocab_size",
    }
)
TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QUERY_KEY_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_LLAMA = _ATTENTION | _NORMS | _MLP
_EXPERT_FIELDS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """Rules by which a GGUF file of one architecture is converted to a model directory.

    `model_type`: the model's `model_type` in config.json. `tensors`: maps the name of a layer's tensor in the file to
    its name in a checkpoint, in which `{}` stands for the number of an expert. `fields`: maps a metadata key of the
    file to the field of config.json that its value is copied to, in addition to `COMMON_FIELDS`. `config`: fields
    of config.json that have the same value for every file. `is_permuted`: whether the two rows of a rotary pair of
    queries and keys are adjacent in the file; in a checkpoint they are half a head apart. `can_rotate_part`: whether a
    rotary dimension below the head size is accepted; it becomes the field `partial_rotary_factor`."""

    model_type: str
    tensors: Mapping[str, str]
    fields: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    is_permuted: bool = False
    can_rotate_part: bool = False


ARCHITECTURES = {
    "llama": GgufArchitecture(model_type="llama", tensors=_LLAMA, is_permuted=True),
    "qwen2": GgufArchitecture(model_type="qwen2", tensors=_LLAMA),
    "qwen3": GgufArchitecture(model_type="qwen3", tensors=_LLAMA | _QUERY_KEY_NORMS),
    "qwen3moe": GgufArchitecture(
        model_type="qwen3_moe",
        tensors=_ATTENTION | _NORMS | _QUERY_KEY_NORMS | _EXPERTS,
        fields=_EXPERT_FIELDS | {"expert_feed_forward_length": "moe_intermediate_size"},
        config={"norm_topk_prob": True},
    ),
    "olmo2": GgufArchitecture(
        model_type="olmo2",
        tensors=_ATTENTION
        | _QUERY_KEY_NORMS
        | _MLP
        | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
    "olmoe": GgufArchitecture(
        model_type="olmoe",
        tensors=_ATTENTION | _NORMS | _QUERY_KEY_NORMS | _EXPERTS,
        fields=_EXPERT_FIELDS,
        config={"norm_topk_prob": False},
    ),
    "phi3": GgufArchitecture(
        model_type="phi3",
        tensors=_NORMS | _FUSED_MLP | {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"},
        can_rotate_part=True,
    ),
    "glm4": GgufArchitecture(
        model_type="glm4",
        tensors=_ATTENTION
        | _NORMS
        | _FUSED_MLP
        | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
        can_rotate_part=True,
    ),
    "granite": GgufArchitecture(
        model_type="granite",
        tensors=_LLAMA,
        fields={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        is_permuted=True,
    ),
}
"""The architectures, by their name in the metadata key `general.architecture`."""
