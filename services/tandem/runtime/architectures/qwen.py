"""Describe Qwen2 and Qwen3, with MLPs or with mixtures of experts."""

from __future__ import annotations

from tandem.runtime.architectures.dense import attention_biases, head_dim_of, llama_like
from tandem.runtime.architectures.fields import Fields
from tandem.runtime.architectures.spec import DecoderSpec, DenseMlp, ExpertsMlp, LayerSpec
from tandem_kernels.contract import ExpertRouting

_QWEN3_HEAD_DIM = 128


def qwen2(fields: Fields) -> DecoderSpec:
    fields.refuse_window_of_last_layers()
    return llama_like(fields, qkv_bias=True)


def qwen3(fields: Fields) -> DecoderSpec:
    fields.refuse_window_of_last_layers()
    head_dim = head_dim_of(fields, _QWEN3_HEAD_DIM)
    return llama_like(fields, head_dim=head_dim, query_key_norm="head", **attention_biases(fields))


def qwen2_moe(fields: Fields) -> DecoderSpec:
    fields.refuse_window_if_on()
    mlp = _experts(fields, shared_inner=fields.size("shared_expert_intermediate_size", 5632))
    return llama_like(fields, layers=_layers(fields, mlp), qkv_bias=fields.flag("qkv_bias", default=True))


def qwen3_moe(fields: Fields) -> DecoderSpec:
    fields.refuse_window_if_on()
    fields.expect("shared_expert_intermediate_size", 0)
    fields.expect("use_qk_norm", value=True)
    layers = _layers(fields, _experts(fields))
    return llama_like(fields, layers=layers, query_key_norm="head", **attention_biases(fields))


def _experts(fields: Fields, shared_inner: int = 0) -> ExpertsMlp:
    routing = ExpertRouting(fields.size("num_experts_per_tok"), is_normalised=fields.flag("norm_topk_prob"))
    return ExpertsMlp(
        count=fields.size_of_any("num_experts", "num_local_experts"),
        inner=fields.size("moe_intermediate_size"),
        routing=routing,
        shared_inner=shared_inner,
        has_shared_gate=shared_inner > 0,
    )


def _layers(fields: Fields, experts: ExpertsMlp) -> tuple[LayerSpec, ...]:
    """Return the layers, of which every `decoder_sparse_step`th has experts unless `mlp_only_layers` lists it."""
    step, dense = fields.size("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    inner = fields.size("intermediate_size")
    return tuple(
        LayerSpec(experts if index not in dense and (index + 1) % step == 0 else DenseMlp(inner))
        for index in range(fields.num_layers())
    )
