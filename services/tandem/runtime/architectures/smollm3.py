"""Describe SmolLM3, a Llama in which every fourth layer does not rotate queries and keys."""

from __future__ import annotations

from tandem.runtime.architectures.dense import attention_biases, head_dim_of, llama_like
from tandem.runtime.architectures.fields import Fields
from tandem.runtime.architectures.refusal import unsupported
from tandem.runtime.architectures.spec import DecoderSpec, DenseMlp, LayerSpec

_THETA = 2_000_000.0


def smollm3(fields: Fields) -> DecoderSpec:
    fields.refuse_window()
    num_layers, interval = fields.num_layers(), fields.size("no_rope_layer_interval", 4)
    mlp = DenseMlp(fields.size("intermediate_size"), has_bias=fields.flag("mlp_bias"))
    # The field's 1 means that the layer has rope.
    has_rope = fields.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(num_layers)]
    if len(has_rope) < num_layers:
        raise unsupported(f"no_rope_layers of {len(has_rope)} layers, and there are {num_layers}")
    layers = tuple(LayerSpec(mlp, has_rope=bool(each)) for each in has_rope[:num_layers])
    return llama_like(
        fields,
        rope=fields.rope(head_dim_of(fields), theta=_THETA),
        layers=layers,
        tied_embeddings=fields.flag("tie_word_embeddings", default=True),
        **attention_biases(fields),
    )
