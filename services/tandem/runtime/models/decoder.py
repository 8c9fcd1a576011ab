"""Run the forward pass of the Llama family on any set of kernels, whole or as one tensor-parallel rank.

Operations and casts are in the order of the checkpoints' reference implementation (transformers), so that rows agree
up to the order of sums inside a matrix product. Projections that read the same input are one matrix.

With tensor parallelism a rank holds a part of each matrix, see `runtime.parallel.shard`. The outputs of attention and
MLP are summed over all ranks; only the first rank adds their biases. Embeddings are split by rows like the head: tied
models have one table for both, and a full copy on each rank would take memory from the KV pool to save one of many
all-reduces per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tandem.runtime.input_batch import Batch
from tandem.runtime.int8 import head_group, layer_group
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.layer_tensors import read_layer
from tandem.runtime.model_config import DecoderConfig
from tandem.runtime.parallel.communicator import ALONE, Communicator
from tandem.runtime.parallel.shard import WHOLE, Shard
from tandem.runtime.random_weights import WeightSource
from tandem.runtime.rope_frequencies import inverse_frequencies
from tandem_kernels.contract import HeadNorms
from tandem_kernels.dispatch import REFERENCE, Kernels, Product
from tandem_kernels.reference.int4 import Codes, find_codes, linear_codes
from tandem_kernels.reference.linear_int8 import embed_int8, linear_int8, quantize_weight


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layer in floating point: called with rows `[T, in]`, it returns rows `[T, out]`.

    `product` computes it. `weight` is `[out, in]`, `bias` `[out]` or None.
    """

    product: Product
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """Linear layer with int8 weights: called with rows `[T, in]`, which it rounds to int8, it returns rows `[T, out]`.

    `weight` is int8 `[out, in]`. `scales` `[out, groups]`: factor of each group of adjacent components of a weight row.
    `bias` is `[out]` or None.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear_int8(x, self.weight, self.scales, self.bias)


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """Linear layer with 4-bit weights: called with rows `[T, in]`, which it rounds to int8, it returns rows `[T, out]`.

    `weight`: 4-bit codes of a matrix `[out, in]` with the scales and offsets that restore its values. `bias` is `[out]`
    or None.
    """

    weight: Codes
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear_codes(x, self.weight, self.bias)


AnyLinear = Linear | Int8Linear | Int4Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer.

    `attention_norm`, `mlp_norm`: norms before attention and MLP. `qkv` computes query, key and value heads side by
    side, `gate_up` the MLP's gate and up projections side by side. `output` and `down` project attention and MLP back
    to hidden rows. `head_norms`: norms of query and key heads; None if the model has none."""

    attention_norm: torch.Tensor
    qkv: AnyLinear
    head_norms: HeadNorms | None
    output: AnyLinear
    mlp_norm: torch.Tensor
    gate_up: AnyLinear
    down: AnyLinear


class Decoder:
    """Llama-family model in any floating-point type on any set of kernels.

    Implements `runtime.models.causal.CausalModel`. `config` is the whole model's. With tensor parallelism the decoder
    holds the weights of its `shard`, the caches passed to it hold the shard's KV heads, and all ranks must call
    `forward` and `logits` together, because each waits for the others."""

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: WeightSource,
        quantization: str = "none",
        kernels: Kernels = REFERENCE,
        shard: Shard = WHOLE,
        communicator: Communicator = ALONE,
    ) -> None:
        """Load all tensors of `checkpoint`. Raises TandemError when one is missing, left over or of the wrong shape."""
        is_int8 = quantization == "int8"
        self._kernels = kernels
        self._shard = shard
        self._communicator = communicator
        self.config = config
        self._scale = config.head_dim**-0.5
        inv_freq, self._rope_scale = inverse_frequencies(config.rope, config.head_dim)
        self._ids = shard.vocab(config.vocab_size)
        self._embeddings = self._take_table(checkpoint, "model.embed_tokens.weight")
        self.dtype = self._embeddings.dtype
        self._inv_freq = inv_freq.to(self._embeddings.device)
        product = None if is_int8 else kernels.linear
        self._layers = tuple(
            _make_layer(dict(read_layer(config, checkpoint, i, shard)), product, config.rms_norm_eps)
            for i in range(config.layers)
        )
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

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Run the layers over a batch and return the hidden rows before the final norm, `[T, hidden]`, on every rank.

        Attention reads the sequences' earlier KV from `cache`; the KV of the batch's T rows is written there. With
        tensor parallelism it raises CollectiveFailed when another rank fails."""
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
        """Return next-token logits `[rows, vocab]` of hidden rows that `forward` returned.

        With tensor parallelism the first rank's `hidden` is broadcast to the others, whose own is overwritten; the
        first rank returns the logits of the whole vocabulary, each other rank only those of its part."""
        hidden = self._communicator.broadcast(hidden)
        logits = self._head(self._kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps))
        if self._shard.is_whole:
            return logits
        parts = self._communicator.gather(logits)
        return logits if parts is None else torch.cat(parts, 1)[:, : self.config.vocab_size]

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens, `[T, hidden]`.

        With tensor parallelism they are summed over ranks; all but one rank contribute zeros, so the sum is exact."""
        if self._shard.is_whole:
            return F.embedding(tokens, self._embeddings)
        places = tokens - self._ids.start
        is_elsewhere = (places < 0) | (places >= len(self._ids))
        rows = F.embedding(places.masked_fill(is_elsewhere, 0), self._embeddings)
        return self._communicator.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))

    def _take_table(self, checkpoint: WeightSource, name: str) -> torch.Tensor:
        """Load the rows of this rank's token ids, `[ids per rank, hidden]`.

        Rows behind the last id are zeros, so that all ranks have the same shape."""
        num_rows = len(Shard(0, self._shard.size).vocab(self.config.vocab_size))
        table = checkpoint.take(name, (self.config.vocab_size, self.config.hidden_size), rows=self._ids)
        return table if len(table) == num_rows else F.pad(table, (0, 0, 0, num_rows - len(table)))


def _make_layer(tensors: Mapping[str, torch.Tensor], product: Product | None, eps: float) -> Layer:
    """Build a layer from what `read_layer` yields, with matrices in floating point, quantised if `product` is None."""

    def linear(name: str) -> AnyLinear:
        weight, bias = tensors[name], tensors.get(f"{name}.bias")
        if product is None:
            return _quantised(weight, bias, layer_group(weight.shape[1]))[0]
        return Linear(product, weight, bias)

    has_head_norms = "query_norm" in tensors
    return Layer(
        attention_norm=tensors["attention_norm"],
        qkv=linear("qkv"),
        head_norms=HeadNorms(tensors["query_norm"], tensors["key_norm"], eps) if has_head_norms else None,
        output=linear("output"),
        mlp_norm=tensors["mlp_norm"],
        gate_up=linear("gate_up"),
        down=linear("down"),
    )


def _quantised(weight: torch.Tensor, bias: torch.Tensor | None, group: int) -> tuple[AnyLinear, torch.Tensor]:
    """Return the quantised layer, and its dequantised weights.

    The weights become 4-bit codes where those are exact, else int8 with one scale per `group` components."""
    codes = find_codes(weight)
    if codes is not None:
        return Int4Linear(codes, bias), weight
    values, scales = quantize_weight(weight, group)
    return Int8Linear(values, scales, bias), embed_int8(torch.arange(len(weight)), values, scales)
