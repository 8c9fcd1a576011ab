"""A compiled decoder over packed weights and a KV pool; owns its buffers and never loads, packs or samples."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch

from tandem_kernels.contract import AttentionBatch
from tandem_kernels.native.library import (
    CDecoder,
    CLayer,
    CMatrix,
    CShape,
    CStep,
    Team,
    address,
    check,
    load,
    matrix_of,
    pool_of,
    release_with,
    rows_of,
)

_MULTIPLES = {"inner": 16, "head_dim": 8}
"""Gate and up columns lie in groups of 16, heads are read in vectors of 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder; `eps` is that of its norms, `attention_scale` the factor on scores."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    eps: float
    attention_scale: float


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A matrix `[n, k]` as panels, see `pack_exact` and `pack_linear_int8`; `bias` in the order of their columns."""

    panels: torch.Tensor
    n: int
    k: int
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayer:
    """One layer; `query_norm` and `key_norm` are `[head_dim]` where the model has them."""

    attention_norm: torch.Tensor
    qkv: PackedLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: PackedLinear
    mlp_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


def unsupported(shape: DecoderShape) -> str | None:
    """Why the compiled decoder cannot have this shape; None when it can."""
    for name, multiple in _MULTIPLES.items():
        if getattr(shape, name) % multiple:
            return f"{name}={getattr(shape, name)} is no multiple of {multiple}"
    return None


class CompiledDecoder:
    """`forward` and `logits` of one model. One call at a time; buffers grow to the largest step and stay."""

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[PackedLayer],
        norm: torch.Tensor,
        head: PackedLinear,
        embeddings: torch.Tensor | None,
        team: Team,
        *,
        quantizes_rows: bool = False,
    ) -> None:
        """`embeddings` `[vocab, hidden]`; None: they are the head's weights. `quantizes_rows`: products as
        `reference.linear_int8` has them, of int8 weights.

        Raises ValueError for a shape that it cannot have and NativeUnavailable without a library.
        """
        reason = unsupported(shape)
        if reason is not None:
            raise ValueError(reason)
        self.shape = shape
        self._team = team
        # The library keeps pointers into these.
        self._keep = (layers, norm, head, embeddings, team)
        layer_specs = (CLayer * len(layers))(*(_layer(layer) for layer in layers))
        spec = CDecoder(_shape(shape), layer_specs, address(norm), _linear(head), address(embeddings), quantizes_rows)
        self._handle = load().tandem_decoder_new(byref(spec))
        if not self._handle:
            raise MemoryError("the compiled decoder could not be made")
        release_with(self, load().tandem_decoder_delete, self._handle)
        self._logits = torch.empty((0, shape.vocab))

    @property
    def buffer_bytes(self) -> int:
        """Private memory of the buffers between operators."""
        return int(load().tandem_decoder_buffer_bytes(self._handle))

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        batch: AttentionBatch,
        pool: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Hidden rows `[T, hidden]` of `tokens` `[T]` (int64, as `positions` and `slots`); writes their KV to `pool`.

        `rope` holds cosines and sines `[positions, head_dim / 2]` that cover every position.
        """
        cos, sin = rope
        hidden = torch.empty((len(tokens), self.shape.hidden))
        step = CStep(
            address(tokens, torch.int64),
            address(positions, torch.int64),
            address(slots, torch.int64),
            len(tokens),
            rows_of(batch),
            pool_of(pool),
            address(cos),
            address(sin),
        )
        check(load().tandem_decoder_forward(self._handle, self._team.handle, byref(step), address(hidden)))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, vocab]` of rows of `forward`; the next call writes over them. Memory of so many megabytes would come
        from the system, page by page, in each step."""
        if len(self._logits) < len(hidden):
            self._logits = torch.empty((len(hidden), self.shape.vocab))
        out = self._logits[: len(hidden)]
        check(load().tandem_decoder_logits(self._handle, self._team.handle, address(hidden), len(hidden), address(out)))
        return out

    def __repr__(self) -> str:
        return f"CompiledDecoder({self.shape.layers} layers, {self._team!r}, buffers {self.buffer_bytes >> 10} KiB)"


def _shape(shape: DecoderShape) -> CShape:
    return CShape(
        shape.hidden, shape.inner, shape.heads, shape.kv_heads, shape.head_dim, shape.layers, shape.vocab,
        shape.eps, shape.attention_scale,
    )  # fmt: skip


def _linear(weights: PackedLinear) -> CMatrix:
    return matrix_of(weights.panels, weights.n, weights.k, weights.scales, weights.bias)


def _layer(layer: PackedLayer) -> CLayer:
    return CLayer(
        address(layer.attention_norm),
        _linear(layer.qkv),
        address(layer.query_norm),
        address(layer.key_norm),
        _linear(layer.output),
        address(layer.mlp_norm),
        _linear(layer.gate_up),
        _linear(layer.down),
    )
