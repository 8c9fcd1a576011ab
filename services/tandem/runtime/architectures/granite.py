"""Describe Granite, a Llama with constant factors on embeddings, residuals, attention and logits, and GraniteMoE."""

from __future__ import annotations

from typing import Any

from tandem.runtime.architectures.dense import attention_biases, llama_like
from tandem.runtime.architectures.fields import Fields
from tandem.runtime.architectures.spec import DecoderSpec, DenseMlp, ExpertsMlp, LayerSpec, WeightNames
from tandem_kernels.contract import ExpertRouting

_MOE_NAMES = WeightNames(
    router="block_sparse_moe.router.layer",
    expert_gate_up=("block_sparse_moe.input_linear",),
    expert_down="block_sparse_moe.output_linear",
)


def granite(fields: Fields) -> DecoderSpec:
    mlp = DenseMlp(fields.size("intermediate_size"), has_bias=fields.flag("mlp_bias"))
    return llama_like(fields, layers=(LayerSpec(mlp),) * fields.num_layers(), **_common(fields))


def granite_moe(fields: Fields) -> DecoderSpec:
    mlp = ExpertsMlp(
        count=fields.size("num_local_experts"),
        inner=fields.size("intermediate_size"),
        routing=ExpertRouting(fields.size("num_experts_per_tok"), scores="softmax of chosen"),
    )
    layers = (LayerSpec(mlp),) * fields.num_layers()
    return llama_like(fields, layers=layers, names=_MOE_NAMES, **_common(fields))


def _common(fields: Fields) -> dict[str, Any]:
    fields.refuse_window()
    return {
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "embedding_multiplier": fields.number("embedding_multiplier", 1.0),
        "residual_multiplier": fields.number("residual_multiplier", 1.0),
        "logits_divisor": fields.number("logits_scaling", 1.0),
        **attention_biases(fields),
    }
