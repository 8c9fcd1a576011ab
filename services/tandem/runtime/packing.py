"""Turns a checkpoint into the tensors that compiled kernels read; never writes or maps a file.

Names are those of the layers' parts (`layers.3.gate_up`), with `.bias` and, for int8, `.scales` beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tandem.runtime.int8 import head_group
from tandem.runtime.model_config import DecoderConfig
from tandem.runtime.weights import Checkpoint
from tandem_kernels.native.pack import pack_gate_up, pack_linear
from tandem_kernels.native.pack_int8 import pack_gate_up_int8, pack_linear_int8

Named = Iterator[tuple[str, torch.Tensor]]


def pack(config: DecoderConfig, checkpoint: Checkpoint, quantization: str) -> Named:
    """All tensors of a model; takes each from the checkpoint when it is its turn. `quantization`: `none` or `int8`."""
    packer = _Packer(quantization == "int8")
    table = (config.vocab_size, config.hidden_size)
    checkpoint.drop(".rotary_emb.inv_freq")
    for i in range(config.layers):
        yield from _pack_layer(config, checkpoint, packer, f"model.layers.{i}.", f"layers.{i}.")
    yield "norm", checkpoint.take("model.norm.weight", (config.hidden_size,))
    embeddings = checkpoint.take("model.embed_tokens.weight", table)
    if config.tied_embeddings:
        checkpoint.drop("lm_head.weight")
        yield from packer.head(embeddings)
    else:
        yield "embeddings", embeddings
        yield from packer.head(checkpoint.take("lm_head.weight", table))


@dataclass(frozen=True, slots=True)
class _Packer:
    is_int8: bool

    def linear(self, name: str, weight: torch.Tensor) -> Named:
        if self.is_int8:
            yield from _with_scales(name, *pack_linear_int8(weight))
        else:
            yield name, pack_linear(weight)

    def gate_up(self, name: str, gate: torch.Tensor, up: torch.Tensor) -> Named:
        if self.is_int8:
            yield from _with_scales(name, *pack_gate_up_int8(gate, up))
        else:
            yield name, pack_gate_up(gate, up)

    def head(self, weight: torch.Tensor) -> Named:
        if self.is_int8:
            yield from _with_scales("head", *pack_linear_int8(weight, head_group(weight.shape[1])))
        else:
            yield "head", pack_linear(weight)


def _with_scales(name: str, panels: torch.Tensor, scales: torch.Tensor) -> Named:
    yield name, panels
    yield f"{name}.scales", scales


def _pack_layer(config: DecoderConfig, checkpoint: Checkpoint, packer: _Packer, source: str, target: str) -> Named:
    hidden, dim = config.hidden_size, config.head_dim
    query, kv = config.heads * dim, config.kv_heads * dim
    projections = (("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv))
    yield f"{target}attention_norm", checkpoint.take(f"{source}input_layernorm.weight", (hidden,))
    rows = [checkpoint.take(f"{source}{name}.weight", (out, hidden)) for name, out in projections]
    yield from packer.linear(f"{target}qkv", torch.cat(rows))
    if config.qkv_bias:
        biases = [checkpoint.take(f"{source}{name}.bias", (out,)) for name, out in projections]
        yield f"{target}qkv.bias", torch.cat(biases)
    if config.qk_norm:
        yield f"{target}query_norm", checkpoint.take(f"{source}self_attn.q_norm.weight", (dim,))
        yield f"{target}key_norm", checkpoint.take(f"{source}self_attn.k_norm.weight", (dim,))
    yield from packer.linear(f"{target}output", checkpoint.take(f"{source}self_attn.o_proj.weight", (hidden, query)))
    if config.output_bias:
        yield f"{target}output.bias", checkpoint.take(f"{source}self_attn.o_proj.bias", (hidden,))
    yield from _pack_mlp(config, checkpoint, packer, source, target)


def _pack_mlp(config: DecoderConfig, checkpoint: Checkpoint, packer: _Packer, source: str, target: str) -> Named:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield f"{target}mlp_norm", checkpoint.take(f"{source}post_attention_layernorm.weight", (hidden,))
    gate, up = (checkpoint.take(f"{source}mlp.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up"))
    yield from packer.gate_up(f"{target}gate_up", gate, up)
    yield from packer.linear(f"{target}down", checkpoint.take(f"{source}mlp.down_proj.weight", (hidden, inner)))
    if config.mlp_bias:
        biases = [checkpoint.take(f"{source}mlp.{name}_proj.bias", (inner,))[:, None] for name in ("gate", "up")]
        yield f"{target}gate_up.bias", pack_gate_up(*biases).flatten()
        yield f"{target}down.bias", checkpoint.take(f"{source}mlp.down_proj.bias", (hidden,))
