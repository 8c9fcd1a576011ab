"""One decoder for the Llama family: weights and the forward pass to final hidden rows; never samples or plans.

Operations and casts are in the order of the checkpoints' reference implementation (transformers), so that rows agree
up to the order of sums inside a matrix product. Projections that read the same input are one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tandem.runtime.batch import Batch
from tandem.runtime.cache import KVCache
from tandem.runtime.int8 import head_group, layer_group
from tandem.runtime.model_config import DecoderConfig
from tandem.runtime.rope import inverse_frequencies
from tandem.runtime.weights import Checkpoint
from tandem_kernels.contract import HeadNorms
from tandem_kernels.dispatch import REFERENCE, Kernels
from tandem_kernels.reference.codes import Codes, find_codes, linear_codes
from tandem_kernels.reference.linear_int8 import embed_int8, linear_int8, quantize_weight


@dataclass(frozen=True, slots=True)
class Linear:
    """`weight` is `[out, in]`, `bias` `[out]` or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """`weight` int8 `[out, in]`, `scales` `[out, groups]`, `bias` `[out]` or None."""

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear_int8(x, self.weight, self.scales, self.bias)


@dataclass(frozen=True, slots=True)
class CodedLinear:
    """`weight` `[out, in]` as 4-bit codes, `bias` `[out]` or None; rows are quantised."""

    weight: Codes
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear_codes(x, self.weight, self.bias)


AnyLinear = Linear | Int8Linear | CodedLinear


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
    """A `runtime.models.causal.CausalModel` in any floating type, on the device of its kernels."""

    def __init__(
        self, config: DecoderConfig, checkpoint: Checkpoint, quantization: str = "none", kernels: Kernels = REFERENCE
    ) -> None:
        """Takes every tensor of `checkpoint`. Raises TandemError when one is missing, left over or misshapen."""
        is_int8 = quantization == "int8"
        self._kernels = kernels
        self.config = config
        self._scale = config.head_dim**-0.5
        inv_freq, self._rope_scale = inverse_frequencies(config.rope, config.head_dim)
        table = (config.vocab_size, config.hidden_size)
        self._embeddings = checkpoint.take("model.embed_tokens.weight", table)
        self._inv_freq = inv_freq.to(self._embeddings.device)
        self._layers = tuple(_load_layer(config, checkpoint, i, is_int8) for i in range(config.layers))
        self._norm = checkpoint.take("model.norm.weight", (config.hidden_size,))
        checkpoint.drop(".rotary_emb.inv_freq")
        if config.tied_embeddings:
            checkpoint.drop("lm_head.weight")
            head = self._embeddings
        else:
            head = checkpoint.take("lm_head.weight", table)
        checkpoint.finish()
        self._head: AnyLinear = Linear(head)
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
        final norm, `[T, hidden]`."""
        kernels, eps = self._kernels, self.config.rms_norm_eps
        x = F.embedding(batch.tokens, self._embeddings)
        cos, sin = kernels.rope_tables(batch.positions, self._inv_freq, self._rope_scale, x.dtype)
        rows = kernels.rms_norm(x, self._layers[0].attention_norm, eps)
        for layer, following, kv in zip(self._layers, (*self._layers[1:], None), cache.layers, strict=True):
            query = kernels.rope_cache_write(layer.qkv(rows), cos, sin, layer.head_norms, kv, batch.slots)
            mixed = kernels.paged_attention(query, kv, batch.attention, self._scale)
            rows, x = kernels.add_rms_norm(layer.output(mixed.flatten(1)), x, layer.mlp_norm, eps)
            out = layer.down(kernels.silu_mul(layer.gate_up(rows)))
            if following is None:
                return x + out
            rows, x = kernels.add_rms_norm(out, x, following.attention_norm, eps)
        raise AssertionError("a decoder has layers")

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits `[rows, vocab]` of rows of `forward`."""
        return self._head(self._kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps))


def _load_layer(config: DecoderConfig, checkpoint: Checkpoint, index: int, is_int8: bool) -> Layer:
    prefix = f"model.layers.{index}"
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def linear(names: Sequence[str], outs: Sequence[int], width: int, has_bias: bool) -> AnyLinear:
        """Several projections of one input as one matrix."""
        rows = zip(names, outs, strict=True)
        weights = [checkpoint.take(f"{prefix}.{name}.weight", (out, width)) for name, out in rows]
        rows = zip(names, outs, strict=True)
        biases = [checkpoint.take(f"{prefix}.{name}.bias", (out,)) for name, out in rows] if has_bias else []
        weight, bias = torch.cat(weights), torch.cat(biases) if has_bias else None
        return _quantised(weight, bias, layer_group(width))[0] if is_int8 else Linear(weight, bias)

    def norm(name: str, width: int = hidden) -> torch.Tensor:
        return checkpoint.take(f"{prefix}.{name}.weight", (width,))

    def head_norms() -> HeadNorms:
        query, key = (norm(f"self_attn.{name}", config.head_dim) for name in ("q_norm", "k_norm"))
        return HeadNorms(query, key, config.rms_norm_eps)

    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return Layer(
        attention_norm=norm("input_layernorm"),
        qkv=linear(projections, (query, kv, kv), hidden, config.qkv_bias),
        head_norms=head_norms() if config.qk_norm else None,
        output=linear(("self_attn.o_proj",), (hidden,), query, config.output_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=linear(("mlp.gate_proj", "mlp.up_proj"), (inner, inner), hidden, config.mlp_bias),
        down=linear(("mlp.down_proj",), (hidden,), inner, config.mlp_bias),
    )


def _quantised(weight: torch.Tensor, bias: torch.Tensor | None, group: int) -> tuple[AnyLinear, torch.Tensor]:
    """The layer whose products are of int8 rows, and its weights as floats."""
    codes = find_codes(weight)
    if codes is not None:
        return CodedLinear(codes, bias), weight
    values, scales = quantize_weight(weight, group)
    return Int8Linear(values, scales, bias), embed_int8(torch.arange(len(weight)), values, scales)
