"""Describe Mixtral: a Mistral in which the MLP of every layer is a mixture of experts."""

from __future__ import annotations

from tandem.runtime.architectures.dense import head_dim_of, llama_like
from tandem.runtime.architectures.fields import Fields
from tandem.runtime.architectures.spec import DecoderSpec, ExpertsMlp, LayerSpec, WeightNames
from tandem_kernels.contract import ExpertRouting

_NAMES = WeightNames(
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    expert_down="block_sparse_moe.experts.{}.w2",
)
_THETA, _EPS = 1_000_000.0, 1e-5


def mixtral(fields: Fields) -> DecoderSpec:
    fields.refuse_window()
    mlp = ExpertsMlp(
        count=fields.size_of_any("num_local_experts", "num_experts"),
        inner=fields.size("intermediate_size"),
        routing=ExpertRouting(fields.size("num_experts_per_tok"), is_normalised=True),
    )
    return llama_like(
        fields,
        rope=fields.rope(head_dim_of(fields), theta=_THETA),
        rms_norm_eps=fields.number("rms_norm_eps", _EPS),
        layers=(LayerSpec(mlp),) * fields.num_layers(),
        names=_NAMES,
    )
