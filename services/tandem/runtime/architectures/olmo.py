"""Describe OLMo2, which has norms only after attention and MLP, and OLMoE. Both normalise all query heads of a row
together, and all its key heads."""

from __future__ import annotations

from tandem.runtime.architectures.dense import attention_biases, llama_like
from tandem.runtime.architectures.fields import Fields
from tandem.runtime.architectures.refusal import unsupported
from tandem.runtime.architectures.spec import DecoderSpec, ExpertsMlp, LayerSpec, WeightNames
from tandem_kernels.contract import ExpertRouting

_NORMS_BEHIND = WeightNames(
    attention_norm=None,
    after_attention_norm="post_attention_layernorm",
    mlp_norm=None,
    after_mlp_norm="post_feedforward_layernorm",
)
_EPS = 1e-5


def olmo2(fields: Fields) -> DecoderSpec:
    fields.refuse_window()
    eps = fields.number("rms_norm_eps", _EPS)
    return llama_like(fields, query_key_norm="row", rms_norm_eps=eps, names=_NORMS_BEHIND, **attention_biases(fields))


def olmoe(fields: Fields) -> DecoderSpec:
    fields.refuse_window()
    if (clip := fields.get("clip_qkv")) is not None:
        raise unsupported(f"clip_qkv={clip}")
    mlp = ExpertsMlp(
        count=fields.size_of_any("num_experts", "num_local_experts"),
        inner=fields.size("intermediate_size"),
        routing=ExpertRouting(fields.size("num_experts_per_tok"), is_normalised=fields.flag("norm_topk_prob")),
    )
    layers = (LayerSpec(mlp),) * fields.num_layers()
    eps = fields.number("rms_norm_eps", _EPS)
    return llama_like(fields, layers=layers, query_key_norm="row", rms_norm_eps=eps, **attention_biases(fields))
