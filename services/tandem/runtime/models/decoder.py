"""One decoder for the Llama family: weights and the forward pass to final hidden rows; never samples or plans.

Operations and casts are in the order of the checkpoints' reference implementation (transformers), so that rows agree
up to the order of sums inside a matrix product. Projections that read the same input are one matrix.

One rank of several holds a part of each matrix, see `runtime.parallel.shard`. It sums what leaves attention and MLP
with the others' and adds the biases of those two on the first rank alone. Embeddings are split like the head: a tied
table is one, and a copy on each rank would take memory from its KV to save one sum of many per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tandem.runtime.input_batch import Batch
from tandem.runtime.int8 import head_group, layer_group
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.model_config import DecoderConfig
from tandem.runtime.parallel.communicator import ALONE, Communicator
from tandem.runtime.parallel.shard import WHOLE, Shard
from tandem.runtime.rope_frequencies import inverse_frequencies
from tandem.runtime.weight_source import WeightSource
from tandem_kernels.contract import HeadNorms
from tandem_kernels.dispatch import REFERENCE, Kernels, Product
from tandem_kernels.reference.int4 import Codes, find_codes, linear_codes
from tandem_kernels.reference.linear_int8 import embed_int8, linear_int8, quantize_weight


@dataclass(frozen=True, slots=True)
class Linear:
    """`weight` is `[out, in]`, `bias` `[out]` or None."""

    product: Product
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """`weight` int8 `[out, in]`, `scales` `[out, groups]`, `bias` `[out]` or None."""

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear_int8(x, self.weight, self.scales, self.bias)


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """`weight` `[out, in]` as 4-bit codes, `bias` `[out]` or None; rows are quantised."""

    weight: Codes
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear_codes(x, self.weight, self.bias)


AnyLinear = Linear | Int8Linear | Int4Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """`qkv` yields query, key and value heads side by side, `gate_up` the MLP's two branches."""

    attention_norm: torch.Tensor
    qkv: AnyLinear
    head_norms: HeadNorms | None
    output: AnyLinear
    mlp_norm: torch.Tensor
    gate_up: AnyLinear
    down: AnyLinear


class Decoder:
    """A `runtime.models.causal.CausalModel` in any floating type, on the device of its kernels.

    As one rank of several it holds its `shard` of `config`, the whole model's, and of a cache its share of KV heads.
    All ranks call `forward` and `logits` together.
    """

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: WeightSource,
        quantization: str = "none",
        kernels: Kernels = REFERENCE,
        shard: Shard = WHOLE,
        communicator: Communicator = ALONE,
    ) -> None:
        """Takes every tensor of `checkpoint`. Raises TandemError when one is missing, left over or misshapen."""
        is_int8 = quantization == "int8"
        self._kernels = kernels
        self._shard = shard
        self._communicator = communicator
        self.config = config
        self._scale = config.head_dim**-0.5
        inv_freq, self._rope_scale = inverse_frequencies(config.rope, config.head_dim)
        self._ids = shard.vocab(config.vocab_size)
        self._embeddings = self._take_table(checkpoint, "model.embed_tokens.weight")
        self._inv_freq = inv_freq.to(self._embeddings.device)
        product = None if is_int8 else kernels.linear
        self._layers = tuple(_load_layer(config, checkpoint, i, product, shard) for i in range(config.layers))
        self._norm = checkpoint.take("model.norm.weight", (config.hidden_size,))
        checkpoint.drop(".rotary_emb.inv_freq")
        if config.tied_embeddings:
            checkpoint.drop("lm_head.weight")
            head = self._embeddings
        else:
            head = self._take_table(checkpoint, "lm_head.weight")
        checkpoint.finish()
        self._head: AnyLinear = Linear(kernels.linear, head)
        if is_int8:
            self._head, floats = _quantised(head, None, head_group(config.hidden_size))
            if config.tied_embeddings:
                self._embeddings = floats

    @property
    def dtype(self) -> torch.dtype:
        return self._embeddings.dtype

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Computes and stores the KV of a batch whose earlier context is in `cache`. Yields the hidden rows before the
        final norm, `[T, hidden]`, on every rank."""
        kernels, eps, all_reduce = self._kernels, self.config.rms_norm_eps, self._communicator.all_reduce
        x = self._embed(batch.tokens)
        cos, sin = kernels.rope_tables(batch.positions, self._inv_freq, self._rope_scale, x.dtype)
        rows = kernels.rms_norm(x, self._layers[0].attention_norm, eps)
        for layer, following, kv in zip(self._layers, (*self._layers[1:], None), cache.layers, strict=True):
            query = kernels.rope_cache_write(layer.qkv(rows), cos, sin, layer.head_norms, kv, batch.slots)
            mixed = kernels.paged_attention(query, kv, batch.attention, self._scale)
            rows, x = kernels.add_rms_norm(all_reduce(layer.output(mixed.flatten(1))), x, layer.mlp_norm, eps)
            out = all_reduce(layer.down(kernels.silu_mul(layer.gate_up(rows))))
            if following is None:
                return x + out
            rows, x = kernels.add_rms_norm(out, x, following.attention_norm, eps)
        raise AssertionError("a decoder has layers")

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits `[rows, vocab]` of rows of `forward`. The first rank's rows count, which are written over
        the others'; those yield their own part of the vocabulary."""
        hidden = self._communicator.broadcast(hidden)
        logits = self._head(self._kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps))
        if self._shard.is_whole:
            return logits
        parts = self._communicator.gather(logits)
        return logits if parts is None else torch.cat(parts, 1)[:, : self.config.vocab_size]

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]`. All but one of the numbers that are summed are zeros: the sum is exact."""
        if self._shard.is_whole:
            return F.embedding(tokens, self._embeddings)
        places = tokens - self._ids.start
        is_elsewhere = (places < 0) | (places >= len(self._ids))
        rows = F.embedding(places.masked_fill(is_elsewhere, 0), self._embeddings)
        return self._communicator.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))

    def _take_table(self, checkpoint: WeightSource, name: str) -> torch.Tensor:
        """Rows of this rank's token ids, `[ids of a rank, hidden]`; zeros behind the last id, so that all ranks have as
        many."""
        num_rows = len(Shard(0, self._shard.size).vocab(self.config.vocab_size))
        table = checkpoint.take(name, (self.config.vocab_size, self.config.hidden_size), rows=self._ids)
        return table if len(table) == num_rows else F.pad(table, (0, 0, 0, num_rows - len(table)))


def _load_layer(
    config: DecoderConfig, checkpoint: WeightSource, index: int, product: Product | None, shard: Shard
) -> Layer:
    prefix = f"model.layers.{index}"
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def into(names: Sequence[str], outs: Sequence[int], has_bias: bool) -> AnyLinear:
        """Several projections of the hidden rows as one matrix, each split by its outputs."""
        weights, biases = [], []
        for name, out in zip(names, outs, strict=True):
            mine = shard.part(out)
            weights.append(checkpoint.take(f"{prefix}.{name}.weight", (out, hidden), rows=mine))
            biases += [checkpoint.take(f"{prefix}.{name}.bias", (out,), rows=mine)] if has_bias else []
        return _linear(product, torch.cat(weights), torch.cat(biases) if has_bias else None)

    def out_of(name: str, width: int, has_bias: bool) -> AnyLinear:
        """A projection to the hidden rows, split by its inputs; its bias is the first rank's."""
        weight = checkpoint.take(f"{prefix}.{name}.weight", (hidden, width), columns=shard.part(width))
        bias = checkpoint.take(f"{prefix}.{name}.bias", (hidden,)) if has_bias else None
        bias = bias if shard.is_first else None
        return _linear(product, weight, bias)

    def norm(name: str, width: int = hidden) -> torch.Tensor:
        return checkpoint.take(f"{prefix}.{name}.weight", (width,))

    def head_norms() -> HeadNorms:
        query, key = (norm(f"self_attn.{name}", config.head_dim) for name in ("q_norm", "k_norm"))
        return HeadNorms(query, key, config.rms_norm_eps)

    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return Layer(
        attention_norm=norm("input_layernorm"),
        qkv=into(projections, (query, kv, kv), config.qkv_bias),
        head_norms=head_norms() if config.qk_norm else None,
        output=out_of("self_attn.o_proj", query, config.output_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=into(("mlp.gate_proj", "mlp.up_proj"), (inner, inner), config.mlp_bias),
        down=out_of("mlp.down_proj", inner, config.mlp_bias),
    )


def _linear(product: Product | None, weight: torch.Tensor, bias: torch.Tensor | None) -> AnyLinear:
    """Of a layer; without a `product` its products are of int8 rows."""
    return Linear(product, weight, bias) if product else _quantised(weight, bias, layer_group(weight.shape[1]))[0]


def _quantised(weight: torch.Tensor, bias: torch.Tensor | None, group: int) -> tuple[AnyLinear, torch.Tensor]:
    """The layer whose products are of int8 rows, and its weights as floats."""
    codes = find_codes(weight)
    if codes is not None:
        return Int4Linear(codes, bias), weight
    values, scales = quantize_weight(weight, group)
    return Int8Linear(values, scales, bias), embed_int8(torch.arange(len(weight)), values, scales)
