"""Describe Phi-3, whose checkpoints store query, key and value projections as one matrix, and gate and up projections
as another."""

from __future__ import annotations

from tandem.runtime.architectures.dense import head_dim_of, llama_like
from tandem.runtime.architectures.fields import Fields
from tandem.runtime.architectures.spec import DecoderSpec, WeightNames

_NAMES = WeightNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
_EPS = 1e-5


def phi3(fields: Fields) -> DecoderSpec:
    fields.refuse_window()
    # Phi-4-mini has these two fields; transformers reads neither.
    fields.expect("full_attn_mod", 1)
    fields.expect("interpolate_factor", 1)
    rope = fields.rope(head_dim_of(fields), partial=1.0)
    return llama_like(fields, rope=rope, rms_norm_eps=fields.number("rms_norm_eps", _EPS), names=_NAMES)
