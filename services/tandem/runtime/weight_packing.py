"""Convert a checkpoint into the packed tensors that the compiled CPU kernels read.

Packed tensors are named by layer and part (`layers.3.gate_up`); biases and scales append `.bias` and `.scales`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

import torch

from tandem.runtime.checkpoint import Checkpoint
from tandem.runtime.int8 import head_group, layer_group
from tandem.runtime.model_config import DecoderConfig
from tandem_kernels.native.pack import gate_up_rows, pack_linear
from tandem_kernels.native.pack_int4 import pack_exact, pack_fours
from tandem_kernels.native.pack_int8 import pack_linear_int8

Named = Iterator[tuple[str, torch.Tensor]]


class Packing(StrEnum):
    """Storage format of weight matrices.

    FLOAT: as floats. EXACT: in the fewest bits that represent the values exactly. INT8: in 4 bits where those are
    exact, else rounded to int8; for products with int8 rows."""

    FLOAT = "float"
    EXACT = "exact"
    INT8 = "int8"


def pack(config: DecoderConfig, checkpoint: Checkpoint, packing: Packing) -> Named:
    """Yield all packed tensors of a model by name, taking each from the checkpoint when it is needed."""
    table = (config.vocab_size, config.hidden_size)
    checkpoint.drop(".rotary_emb.inv_freq")
    for i in range(config.layers):
        yield from _pack_layer(config, checkpoint, packing, f"model.layers.{i}.", f"layers.{i}.")
    yield "norm", checkpoint.take("model.norm.weight", (config.hidden_size,))
    embeddings = checkpoint.take("model.embed_tokens.weight", table)
    head = embeddings
    if config.tied_embeddings:
        checkpoint.drop("lm_head.weight")
    else:
        yield "embeddings", embeddings
        head = checkpoint.take("lm_head.weight", table)
    yield from _matrix("head", head, packing, head_group)


def _matrix(name: str, weight: torch.Tensor, packing: Packing, group: Callable[[int], int] = layer_group) -> Named:
    """Yield a packed matrix, and its scales if the format has any.

    `group(width)` is how many components of a channel of that width share a scale when they are rounded to int8."""
    scales = None
    if packing is Packing.INT8:
        fours = pack_fours(weight)
        panels, scales = (fours, None) if fours is not None else pack_linear_int8(weight, group(weight.shape[1]))
    elif packing is Packing.EXACT:
        panels, scales = pack_exact(weight)
    else:
        panels = pack_linear(weight)
    yield name, panels
    if scales is not None:
        yield f"{name}.scales", scales


def _pack_layer(config: DecoderConfig, checkpoint: Checkpoint, packing: Packing, source: str, target: str) -> Named:
    hidden, dim = config.hidden_size, config.head_dim
    query, kv = config.heads * dim, config.kv_heads * dim
    projections = (("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv))
    yield f"{target}attention_norm", checkpoint.take(f"{source}input_layernorm.weight", (hidden,))
    rows = [checkpoint.take(f"{source}{name}.weight", (out, hidden)) for name, out in projections]
    yield from _matrix(f"{target}qkv", torch.cat(rows), packing)
    if config.qkv_bias:
        biases = [checkpoint.take(f"{source}{name}.bias", (out,)) for name, out in projections]
        yield f"{target}qkv.bias", torch.cat(biases)
    if config.qk_norm:
        yield f"{target}query_norm", checkpoint.take(f"{source}self_attn.q_norm.weight", (dim,))
        yield f"{target}key_norm", checkpoint.take(f"{source}self_attn.k_norm.weight", (dim,))
    yield from _matrix(f"{target}output", checkpoint.take(f"{source}self_attn.o_proj.weight", (hidden, query)), packing)
    if config.output_bias:
        yield f"{target}output.bias", checkpoint.take(f"{source}self_attn.o_proj.bias", (hidden,))
    yield from _pack_mlp(config, checkpoint, packing, source, target)


def _pack_mlp(config: DecoderConfig, checkpoint: Checkpoint, packing: Packing, source: str, target: str) -> Named:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield f"{target}mlp_norm", checkpoint.take(f"{source}post_attention_layernorm.weight", (hidden,))
    gate, up = (checkpoint.take(f"{source}mlp.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up"))
    yield from _matrix(f"{target}gate_up", gate_up_rows(gate, up), packing)
    yield from _matrix(f"{target}down", checkpoint.take(f"{source}mlp.down_proj.weight", (hidden, inner)), packing)
    if config.mlp_bias:
        biases = [checkpoint.take(f"{source}mlp.{name}_proj.bias", (inner,))[:, None] for name in ("gate", "up")]
        yield f"{target}gate_up.bias", gate_up_rows(*biases).flatten()
        yield f"{target}down.bias", checkpoint.take(f"{source}mlp.down_proj.bias", (hidden,))
