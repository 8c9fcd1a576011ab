"""The Llama family on compiled kernels: packs a checkpoint once per machine and runs it; never samples or plans.

`tandem.runtime.models.decoder` is the meaning; rows agree with it up to the order of sums. Beyond that, a row's result
is the same bits whatever shares its step: kernels keep one order of operations per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from tandem.runtime.cache import KVCache
from tandem.runtime.importing import build_once
from tandem.runtime.model_config import DecoderConfig
from tandem.runtime.packed import read_tensors, write_tensors
from tandem.runtime.rope import inverse_frequencies
from tandem.runtime.weights import Checkpoint
from tandem_kernels.contract import AttentionBatch
from tandem_kernels.native.decoder import CompiledDecoder, DecoderShape, PackedLayer, PackedLinear
from tandem_kernels.native.library import Team
from tandem_kernels.native.pack import pack_gate_up, pack_linear
from tandem_kernels.reference import rope_tables

_FORMAT = 1
"""Part of the cached file's name; to be raised when what is written changes."""


class CompiledModel:
    """A `runtime.models.causal.CausalModel` in float32."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, torch.Tensor], team: Team) -> None:
        """`weights` as `packed_weights` yields them."""
        self.config = config
        self._decoder = CompiledDecoder(
            shape_of(config),
            [_layer(config, weights, f"layers.{i}.") for i in range(config.layers)],
            weights["norm"],
            PackedLinear(weights["head"], config.vocab_size, config.hidden_size),
            weights.get("embeddings"),
            team,
        )
        self._inv_freq, self._rope_scale = inverse_frequencies(config.rope, config.head_dim)
        self._rope = self._tables(0)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: AttentionBatch,
        cache: KVCache,
    ) -> torch.Tensor:
        """As `Decoder.forward`."""
        end = int(positions.max()) + 1 if len(positions) else 0
        if end > len(self._rope[0]):
            self._rope = self._tables(end)
        return self._decoder.forward(tokens, positions, slots, attention, cache.pool, self._rope)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `Decoder.logits`."""
        return self._decoder.logits(hidden.contiguous())

    def _tables(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for at least so many positions, `[positions, head_dim / 2]` each."""
        count = max(1024, 1 << (num_positions - 1).bit_length())
        cos, sin = rope_tables(torch.arange(count), self._inv_freq, self._rope_scale, torch.float32)
        half = self.config.head_dim // 2
        return cos[:, :half].contiguous(), sin[:, :half].contiguous()

    def __repr__(self) -> str:
        return f"CompiledModel({self._decoder!r})"


def shape_of(config: DecoderConfig) -> DecoderShape:
    return DecoderShape(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        layers=config.layers,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        attention_scale=config.head_dim**-0.5,
    )


def packed_weights(
    open_checkpoint: Callable[[], Checkpoint], config: DecoderConfig, digest: str, cache_dir: Path
) -> Mapping[str, torch.Tensor]:
    """The weights as the kernels read them, packed on first use and mapped. `digest` names the checkpoint.

    Raises TandemError when a tensor is missing, left over or misshapen.
    """

    def build(folder: Path) -> None:
        with open_checkpoint() as checkpoint:
            write_tensors(folder, _pack(config, checkpoint))
            checkpoint.finish()

    return read_tensors(build_once(cache_dir / "packed" / f"{digest[:32]}-{_FORMAT}", build))


def _pack(config: DecoderConfig, checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    table = (config.vocab_size, config.hidden_size)
    checkpoint.drop(".rotary_emb.inv_freq")
    for i in range(config.layers):
        yield from _pack_layer(config, checkpoint, f"model.layers.{i}.", f"layers.{i}.")
    yield "norm", checkpoint.take("model.norm.weight", (config.hidden_size,))
    embeddings = checkpoint.take("model.embed_tokens.weight", table)
    if config.tied_embeddings:
        checkpoint.drop("lm_head.weight")
        yield "head", pack_linear(embeddings)
    else:
        yield "embeddings", embeddings
        yield "head", pack_linear(checkpoint.take("lm_head.weight", table))


def _pack_layer(
    config: DecoderConfig, checkpoint: Checkpoint, source: str, target: str
) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.heads * dim, config.kv_heads * dim

    def weight(name: str, out: int, width: int) -> torch.Tensor:
        return checkpoint.take(f"{source}{name}.weight", (out, width))

    def bias(name: str, out: int) -> torch.Tensor:
        return checkpoint.take(f"{source}{name}.bias", (out,))

    projections = (("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv))
    yield f"{target}attention_norm", checkpoint.take(f"{source}input_layernorm.weight", (hidden,))
    yield f"{target}qkv", pack_linear(torch.cat([weight(name, out, hidden) for name, out in projections]))
    if config.qkv_bias:
        yield f"{target}qkv.bias", torch.cat([bias(name, out) for name, out in projections])
    if config.qk_norm:
        yield f"{target}query_norm", checkpoint.take(f"{source}self_attn.q_norm.weight", (dim,))
        yield f"{target}key_norm", checkpoint.take(f"{source}self_attn.k_norm.weight", (dim,))
    yield f"{target}output", pack_linear(weight("self_attn.o_proj", hidden, query))
    if config.output_bias:
        yield f"{target}output.bias", bias("self_attn.o_proj", hidden)
    yield f"{target}mlp_norm", checkpoint.take(f"{source}post_attention_layernorm.weight", (hidden,))
    gate, up = weight("mlp.gate_proj", inner, hidden), weight("mlp.up_proj", inner, hidden)
    yield f"{target}gate_up", pack_gate_up(gate, up)
    if config.mlp_bias:
        rows = pack_gate_up(bias("mlp.gate_proj", inner)[:, None], bias("mlp.up_proj", inner)[:, None])
        yield f"{target}gate_up.bias", rows.flatten()
    yield f"{target}down", pack_linear(weight("mlp.down_proj", hidden, inner))
    if config.mlp_bias:
        yield f"{target}down.bias", bias("mlp.down_proj", hidden)


def _layer(config: DecoderConfig, weights: Mapping[str, torch.Tensor], prefix: str) -> PackedLayer:
    hidden, query = config.hidden_size, config.heads * config.head_dim
    kv = config.kv_heads * config.head_dim

    def linear(name: str, n: int, k: int) -> PackedLinear:
        return PackedLinear(weights[prefix + name], n, k, weights.get(f"{prefix}{name}.bias"))

    return PackedLayer(
        attention_norm=weights[f"{prefix}attention_norm"],
        qkv=linear("qkv", query + 2 * kv, hidden),
        query_norm=weights.get(f"{prefix}query_norm"),
        key_norm=weights.get(f"{prefix}key_norm"),
        output=linear("output", hidden, query),
        mlp_norm=weights[f"{prefix}mlp_norm"],
        gate_up=linear("gate_up", 2 * config.intermediate_size, hidden),
        down=linear("down", hidden, config.intermediate_size),
    )
