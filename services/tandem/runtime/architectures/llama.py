"""Describe Llama, and Mistral as far as its sliding window is not shorter than the longest context."""

from __future__ import annotations

from tandem.runtime.architectures.dense import attention_biases, llama_like
from tandem.runtime.architectures.fields import Fields
from tandem.runtime.architectures.spec import DecoderSpec, DenseMlp, LayerSpec

_MISTRAL_WINDOW = 4096
"""Window of a Mistral whose config.json has none, as in transformers."""


def llama(fields: Fields) -> DecoderSpec:
    fields.refuse_window()
    mlp = DenseMlp(fields.size("intermediate_size"), has_bias=fields.flag("mlp_bias"))
    layers = (LayerSpec(mlp),) * fields.num_layers()
    return llama_like(fields, layers=layers, **attention_biases(fields))


def mistral(fields: Fields) -> DecoderSpec:
    fields.refuse_window(_MISTRAL_WINDOW)
    return llama_like(fields)
