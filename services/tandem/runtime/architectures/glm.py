"""Describe GLM-4, which has norms before and after attention and MLP, and GLM-4-MoE (GLM-4.5). Both rotate half of each
head's components."""

from __future__ import annotations

from tandem.runtime.architectures.dense import head_dim_of, llama_like
from tandem.runtime.architectures.fields import Fields
from tandem.runtime.architectures.spec import DecoderSpec, DenseMlp, ExpertsMlp, LayerSpec, WeightNames
from tandem_kernels.contract import ExpertRouting

_GLM4_NAMES = WeightNames(
    after_attention_norm="post_self_attn_layernorm",
    after_mlp_norm="post_mlp_layernorm",
    gate_up=("mlp.gate_up_proj",),
)
_MOE_NAMES = WeightNames(
    shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)
_ROTATED = 0.5
_GLM4_EPS, _MOE_EPS = 1.5625e-7, 1e-5


def glm4(fields: Fields) -> DecoderSpec:
    fields.refuse_window()
    head_dim = head_dim_of(fields, 128)
    return llama_like(
        fields,
        head_dim=head_dim,
        rope=fields.rope(head_dim, partial=_ROTATED, is_interleaved=True),
        qkv_bias=fields.flag("attention_bias", default=True),
        rms_norm_eps=fields.number("rms_norm_eps", _GLM4_EPS),
        names=_GLM4_NAMES,
    )


def glm4_moe(fields: Fields) -> DecoderSpec:
    fields.refuse_window()
    head_dim, inner = head_dim_of(fields), fields.size("moe_intermediate_size")
    routing = ExpertRouting(
        fields.size("num_experts_per_tok"),
        scores="sigmoid",
        is_normalised=fields.flag("norm_topk_prob", default=True),
        scaling=fields.number("routed_scaling_factor", 1.0),
        num_groups=fields.size("n_group", 1),
        num_chosen_groups=fields.size("topk_group", 1),
    )
    experts = ExpertsMlp(
        count=fields.size_of_any("n_routed_experts", "num_local_experts"),
        inner=inner,
        routing=routing,
        shared_inner=inner * fields.size("n_shared_experts", 1),
        has_choice_bias=True,
        routes_in_float32=True,
    )
    dense, num_dense = DenseMlp(fields.size("intermediate_size")), fields.get("first_k_dense_replace", 1)
    return llama_like(
        fields,
        head_dim=head_dim,
        rope=fields.rope(head_dim, partial=_ROTATED),
        layers=tuple(LayerSpec(dense if i < num_dense else experts) for i in range(fields.num_layers())),
        qkv_bias=fields.flag("attention_bias"),
        num_extra_layers=_num_extra_layers(fields),
        query_key_norm="head" if fields.flag("use_qk_norm") else "none",
        rms_norm_eps=fields.number("rms_norm_eps", _MOE_EPS),
        names=_MOE_NAMES,
    )


def _num_extra_layers(fields: Fields) -> int:
    name = "num_nextn_predict_layers"
    return fields.num_layers(name) if fields.get(name) else 0
