"""Run a compiled decoder on packed weights and a KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from operator import is_not

import torch

from tandem_kernels.contract import AttentionBatch, ExpertRouting
from tandem_kernels.native.library import (
    CDecoder,
    CExpertRouting,
    CExperts,
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
from tandem_kernels.native.pack_codes import PackedMatrix

_INNER_MULTIPLE, _HEAD_MULTIPLE = 16, 8
"""Required divisors: gate and up columns are interleaved in groups of 16, heads are read in vectors of 8."""
_SCORES = ("softmax", "sigmoid", "softmax of chosen")
"""Names of scores in the order of `Scores` in experts.hpp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder model.

    `hidden`: width of a row. `inners`: widths of the layers' MLPs. `heads`, `kv_heads`: number of query and of KV
    heads. `eps`: of all norms. `attention_scale`: factor on attention scores before the softmax. `has_row_norms`: norms
    of queries and keys are of all heads of a row together. `embedding_multiplier`
    and `residual_multiplier` are factors of embeddings and of what is added to a row; logits are divided by
    `logits_divisor`.
    """

    hidden: int
    inners: frozenset[int]
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    eps: float
    attention_scale: float
    has_row_norms: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights `[n, k]` of a linear layer. `bias` is in the order of the panels' columns; None: no bias."""

    packed: PackedMatrix
    n: int
    k: int
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackedMlp:
    """Packed weights of a gated MLP of width `inner`."""

    inner: int
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """Packed weights of a mixture of `count` experts of width `inner`.

    `gate_up` and `down` are the matrices of all experts below each other, each padded to whole panels. `choice_bias` is
    `[count]`, `shared_gate` `[hidden]`; None if there is none, like `shared`, which every row passes through. `tokens`:
    int64 `[count]`, the tokens that each expert has computed; every step adds its own.
    """

    count: int
    inner: int
    routing: ExpertRouting
    router: PackedLinear
    choice_bias: torch.Tensor | None
    gate_up: PackedLinear
    down: PackedLinear
    shared: PackedMlp | None
    shared_gate: torch.Tensor | None
    tokens: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayer:
    """Packed weights of one layer. `qkv`: one matrix, or several whose outputs are side by side. A norm that is None
    does not exist; `query_norm` and `key_norm` are `[head_dim]`, or have all heads. `has_rope`: queries and keys are
    rotated."""

    has_rope: bool
    attention_norm: torch.Tensor | None
    qkv: tuple[PackedLinear, ...]
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: PackedLinear
    after_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: PackedMlp | PackedExperts
    after_mlp_norm: torch.Tensor | None


def unsupported(shape: DecoderShape) -> str | None:
    """Return why the compiled decoder does not support this shape; None if it does."""
    for inner in sorted(shape.inners):
        if inner % _INNER_MULTIPLE:
            return f"inner={inner} is no multiple of {_INNER_MULTIPLE}"
    if shape.head_dim % _HEAD_MULTIPLE:
        return f"head_dim={shape.head_dim} is no multiple of {_HEAD_MULTIPLE}"
    return None


class CompiledDecoder:
    """Compute hidden rows and logits of one model in compiled code.

    Owns buffers that grow to the largest step, so only one call may run at a time.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[PackedLayer],
        norm: torch.Tensor,
        head: PackedLinear,
        embeddings: PackedLinear | None,
        team: Team,
        *,
        quantizes_rows: bool = False,
    ) -> None:
        """Build the decoder.

        `embeddings`: the table `[vocab, hidden]`; None if it is the head. `quantizes_rows`: quantise rows to int8 as
        `reference.linear_int8` does, for int8 weights. Raises ValueError for an unsupported shape and NativeUnavailable
        when there is no library.
        """
        reason = unsupported(shape)
        if reason is not None:
            raise ValueError(reason)
        self.shape = shape
        self._team = team
        # The library keeps pointers into these objects.
        self._references = (layers, norm, head, embeddings, team)
        layer_specs = (CLayer * len(layers))(*(_layer(layer) for layer in layers))
        table = _linear(embeddings) if embeddings else CMatrix()
        spec = CDecoder(_shape(shape), layer_specs, address(norm), _linear(head), table, quantizes_rows)
        self._handle = load().tandem_decoder_new(byref(spec))
        if not self._handle:
            raise MemoryError("the compiled decoder could not be allocated")
        release_with(self, load().tandem_decoder_delete, self._handle)
        self._logits = torch.empty((0, shape.vocab))
        # The inputs of the last step, which are compared by identity and kept alive, and the struct with their
        # addresses. Callers may fill these tensors again, but must not resize them.
        self._inputs: tuple[object, ...] = ()
        self._step: CStep | None = None

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of the decoder's activation buffers."""
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
        """Return the hidden rows `[T, hidden]` of `tokens`, after writing their KV to `pool`.

        `tokens`, `positions` and `slots` (where each token's KV is written) are int64 `[T]`. `rope` holds cosines and
        sines `[positions, head_dim / 2]` that cover every position.
        """
        num_rows = tokens.shape[0]
        hidden = torch.empty((num_rows, self.shape.hidden), dtype=torch.float32, device="cpu")
        inputs = (tokens, positions, slots, batch, pool, rope)
        if self._step is None or any(map(is_not, inputs, self._inputs)):
            cos, sin = rope
            self._step = None  # and stays so if the next lines raise
            self._step = CStep(
                address(tokens, torch.int64),
                address(positions, torch.int64),
                address(slots, torch.int64),
                num_rows,
                rows_of(batch),
                pool_of(pool),
                address(cos),
                address(sin),
            )
            self._inputs = inputs
        step = byref(self._step)
        check(load().tandem_decoder_forward(self._handle, self._team.handle, step, hidden.data_ptr()))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits `[rows, vocab]` of rows from `forward`; the next call overwrites them.

        The buffer is reused because allocating megabytes per step would page-fault in new memory each time."""
        num_rows = hidden.shape[0]
        if self._logits.shape[0] < num_rows:
            self._logits = torch.empty((num_rows, self.shape.vocab), dtype=torch.float32, device="cpu")
        out = self._logits[:num_rows]
        check(load().tandem_decoder_logits(self._handle, self._team.handle, address(hidden), num_rows, out.data_ptr()))
        return out

    def __repr__(self) -> str:
        return f"CompiledDecoder({self.shape.layers} layers, {self._team!r}, buffers {self.buffer_bytes >> 10} KiB)"


def _shape(shape: DecoderShape) -> CShape:
    return CShape(
        shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.layers, shape.vocab, shape.has_row_norms,
        shape.eps, shape.attention_scale, shape.embedding_multiplier, shape.residual_multiplier, shape.logits_divisor,
    )  # fmt: skip


def _linear(weights: PackedLinear) -> CMatrix:
    return matrix_of(weights.packed, weights.n, weights.k, weights.bias)


def _layer(layer: PackedLayer) -> CLayer:
    dense = layer.mlp if isinstance(layer.mlp, PackedMlp) else None
    return CLayer(
        layer.has_rope,
        address(layer.attention_norm),
        (CMatrix * 3)(*(_linear(part) for part in layer.qkv)),
        address(layer.query_norm),
        address(layer.key_norm),
        _linear(layer.output),
        address(layer.after_attention_norm),
        address(layer.mlp_norm),
        dense.inner if dense else 0,
        _linear(dense.gate_up) if dense else CMatrix(),
        _linear(dense.down) if dense else CMatrix(),
        _experts(layer.mlp) if isinstance(layer.mlp, PackedExperts) else CExperts(),
        address(layer.after_mlp_norm),
    )


def _experts(experts: PackedExperts) -> CExperts:
    routing, shared = experts.routing, experts.shared
    return CExperts(
        experts.count,
        experts.inner,
        CExpertRouting(
            routing.num_chosen,
            _SCORES.index(routing.scores),
            routing.is_normalised,
            routing.scaling,
            routing.num_groups,
            routing.num_chosen_groups,
        ),
        _linear(experts.router),
        address(experts.choice_bias),
        _linear(experts.gate_up),
        _linear(experts.down),
        shared.inner if shared else 0,
        _linear(shared.gate_up) if shared else CMatrix(),
        _linear(shared.down) if shared else CMatrix(),
        address(experts.shared_gate),
        address(experts.tokens, torch.int64),
    )
