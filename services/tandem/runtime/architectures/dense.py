"""Build the specification that families share: a Llama, with what a family does differently."""

from __future__ import annotations

from typing import Any

from tandem.runtime.architectures.fields import Fields, token_ids
from tandem.runtime.architectures.refusal import unsupported
from tandem.runtime.architectures.spec import DecoderSpec, DenseMlp, ExpertsMlp, LayerSpec, RopeConfig


def llama_like(fields: Fields, **different: Any) -> DecoderSpec:
    """Return the specification of a Llama of the sizes in config.json; `different` replaces fields of it.

    Raises TandemError for a size that is missing or does not fit."""
    fields.require_silu()
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise unsupported(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    head_dim = different.pop("head_dim", None) or head_dim_of(fields)
    rope = different.pop("rope", None) or fields.rope(head_dim)
    num_layers = fields.num_layers()
    layers = different.pop("layers", None) or (LayerSpec(DenseMlp(fields.size("intermediate_size"))),) * num_layers
    for mlp in {layer.mlp for layer in layers}:
        if isinstance(mlp, ExpertsMlp):
            _check(mlp)
    common = {
        "model_type": fields.model_type,
        "vocab_size": fields.size("vocab_size"),
        "hidden_size": fields.size("hidden_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_length": max_length(rope, fields.size("max_position_embeddings")),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": rope,
        "layers": layers,
        "tied_embeddings": fields.flag("tie_word_embeddings"),
        "eos_token_ids": token_ids(fields.get("eos_token_id")),
        "bos_token_id": fields.get("bos_token_id"),
        "attention_scale": head_dim**-0.5,
    }
    return DecoderSpec(**(common | different))


def _check(mlp: ExpertsMlp) -> None:
    """Raise TandemError when a router cannot choose as it is asked to."""
    routing = mlp.routing
    if routing.num_chosen > mlp.count:
        raise unsupported(f"num_experts_per_tok={routing.num_chosen} of {mlp.count} experts")
    if mlp.count % routing.num_groups or (routing.num_groups > 1 and mlp.count < 2 * routing.num_groups):
        raise unsupported(f"{mlp.count} experts in {routing.num_groups} groups")
    if routing.num_chosen_groups > routing.num_groups:
        raise unsupported(f"a choice from {routing.num_chosen_groups} of {routing.num_groups} groups")
    if routing.num_chosen * routing.num_groups > mlp.count * routing.num_chosen_groups:
        raise unsupported(f"a choice of {routing.num_chosen} experts from {routing.num_chosen_groups} groups")


def head_dim_of(fields: Fields, default: int | None = None) -> int:
    """Return the head size, by default the hidden size divided by the number of heads. Raises TandemError if odd."""
    by_heads = fields.size("hidden_size") // fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", default or by_heads)
    if head_dim % 2:
        raise unsupported(f"head_dim={head_dim} is odd")
    return head_dim


def max_length(rope: RopeConfig, length: int) -> int:
    """Return the longest context in tokens. YaRN checkpoints often state `length` as it was before the extension."""
    if rope.kind == "yarn" and rope.original_length is not None:
        return max(length, int(rope.original_length * rope.factor))
    return length


def attention_biases(fields: Fields) -> dict[str, bool]:
    """Return what `attention_bias` means where it adds biases to all four projections of attention."""
    has_bias = fields.flag("attention_bias")
    return {"qkv_bias": has_bias, "output_bias": has_bias}
