"""Read the tensors of one decoder layer from a model's weights; projections that read the same input become one
matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tandem.runtime.model_config import DecoderConfig
from tandem.runtime.parallel.shard import WHOLE, Shard
from tandem.runtime.random_weights import WeightSource

Named = Iterator[tuple[str, torch.Tensor]]


def read_layer(config: DecoderConfig, source: WeightSource, index: int, shard: Shard = WHOLE) -> Named:
    """Yield a rank's part of the tensors of decoder layer `index`, as (name within the layer, tensor).

    Each tensor is read from `source` when the iterator reaches it. `shard`: the rank; by default the whole tensors are
    read. Projections of the same input are one matrix: `qkv` and `gate_up`. Raises TandemError when a tensor is missing
    or of the wrong shape."""
    prefix = f"model.layers.{index}"
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.heads * dim, config.kv_heads * dim

    def norm(name: str, width: int) -> torch.Tensor:
        return source.take(f"{prefix}.{name}.weight", (width,))

    def into(part: str, outs: Mapping[str, int], has_bias: bool) -> Named:
        """Yield several projections of the hidden rows as one matrix, each split by its outputs."""
        weights = [
            source.take(f"{prefix}.{name}.weight", (out, hidden), rows=shard.part(out)) for name, out in outs.items()
        ]
        yield part, torch.cat(weights)
        if has_bias:
            biases = [source.take(f"{prefix}.{name}.bias", (out,), rows=shard.part(out)) for name, out in outs.items()]
            yield f"{part}.bias", torch.cat(biases)

    def out_of(part: str, name: str, width: int, has_bias: bool) -> Named:
        """Yield a projection to the hidden rows, split by its inputs; only the first rank has its bias."""
        yield part, source.take(f"{prefix}.{name}.weight", (hidden, width), columns=shard.part(width))
        if has_bias:
            bias = source.take(f"{prefix}.{name}.bias", (hidden,))
            if shard.is_first:
                yield f"{part}.bias", bias

    yield "attention_norm", norm("input_layernorm", hidden)
    projections = {"self_attn.q_proj": query, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    yield from into("qkv", projections, config.qkv_bias)
    if config.qk_norm:
        yield "query_norm", norm("self_attn.q_norm", dim)
        yield "key_norm", norm("self_attn.k_norm", dim)
    yield from out_of("output", "self_attn.o_proj", query, config.output_bias)
    yield "mlp_norm", norm("post_attention_layernorm", hidden)
    yield from into("gate_up", {"mlp.gate_proj": inner, "mlp.up_proj": inner}, config.mlp_bias)
    yield from out_of("down", "mlp.down_proj", inner, config.mlp_bias)
