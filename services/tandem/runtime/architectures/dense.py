"""Build the `DecoderSpec` of a model family as that of a Llama, with the fields in which the family differs."""

from __future__ import annotations

from typing import Any

from tandem.runtime.architectures.fields import Fields, token_ids
from tandem.runtime.architectures.refusal import unsupported
from tandem.runtime.architectures.spec import DecoderSpec, DenseMlp, ExpertsMlp, LayerSpec, RopeConfig


def llama_like(fields: Fields, **different: Any) -> DecoderSpec:
    """Return the `DecoderSpec` of a model that differs from a Llama only in the values given in `different`.

    `fields`: the model's config.json, from which all other values are read. `different`: values of fields of
    `DecoderSpec`, by field name. Raises TandemError for a size that is missing or does not fit the other sizes, and for
    an activation other than SiLU."""
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
    """Raise TandemError if the numbers of experts and groups do not allow the choice that `mlp.routing` describes."""
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
    """Return the number of components of an attention head.

    It is the field `head_dim` of the config.json in `fields`. If that is not set, it is `default`; if `default` is
    None, it is the hidden size divided by the number of query heads. Raises TandemError if the result is odd."""
    by_heads = fields.size("hidden_size") // fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", default or by_heads)
    if head_dim % 2:
        raise unsupported(f"head_dim={head_dim} is odd")
    return head_dim


def max_length(rope: RopeConfig, length: int) -> int:
    """Return the longest context of a model in tokens: `length`, or with YaRN at least the length after YaRN's
    extension.

    `rope`: parameters of the model's rotary embeddings. `length`: `max_position_embeddings` of config.json. In YaRN
    checkpoints this field often states the length before the extension, which is shorter."""
    if rope.kind == "yarn" and rope.original_length is not None:
        return max(length, int(rope.original_length * rope.factor))
    return length


def attention_biases(fields: Fields) -> dict[str, bool]:
    """Return the values of the fields `qkv_bias` and `output_bias` of `DecoderSpec`, by field name.

    Both values are that of the field `attention_bias` of config.json. They are for families in which this field adds
    biases to all four projections of attention (queries, keys, values and output)."""
    has_bias = fields.flag("attention_bias")
    return {"qkv_bias": has_bias, "output_bias": has_bias}
