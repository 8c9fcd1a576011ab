"""Read the tensors of one decoder layer from a model's weights, and join projections that read the same input to one
matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tandem.runtime.architectures.spec import DecoderSpec, DenseMlp, ExpertsMlp
from tandem.runtime.architectures.stored_format import AnyMatrix
from tandem.runtime.matrices import join_as_floats, join_rows, select_rows
from tandem.runtime.parallel.shard import WHOLE, Shard
from tandem.runtime.random_weights import WeightSource
from tandem.runtime.rope_frequencies import rope_order

Named = Iterator[tuple[str, torch.Tensor]]
NamedMatrices = Iterator[tuple[str, AnyMatrix]]
_UNUSED_SCALES = (
    ".activation_scale", ".input_global_scale", ".input_scale", ".input_scale_ub", ".k_scale", ".kv_scale",
    ".output_scale", ".prob_output_scale", ".q_scale", ".v_scale",
)  # fmt: skip
"""Suffixes of scales of activations, queries and KV, which are not read because nothing is rounded by them."""


def read_layer(spec: DecoderSpec, source: WeightSource, index: int, shard: Shard = WHOLE) -> NamedMatrices:
    """Yield a rank's part of the tensors of decoder layer `index`, as (name within the layer, tensor).

    `source`: the model's weights, from which each tensor is read when the iterator reaches it. `shard`: the rank's
    part; by default whole tensors are read. Matrices that the checkpoint stores in few bits are yielded as codes.
    Components of queries and keys are in the order of `rope_order`.

    Projections that read the same input are joined to one matrix, `qkv` or `gate_up`. If the formats of queries, keys
    and values differ, these are yielded as `qkv.0`, `qkv.1` and `qkv.2` instead; other matrices of different formats
    become floats when they are joined. The matrices of the rank's E experts are concatenated by rows: `expert_gate_up`
    `[E * 2 * inner, hidden]` and `expert_down` `[E * hidden, inner]`. Raises TandemError when a tensor is missing or of
    the wrong shape."""
    reader = _LayerReader(spec, source, f"model.layers.{index}.", shard)
    names, mlp = spec.names, spec.layers[index].mlp
    yield from reader.norm("attention_norm", names.attention_norm)
    yield from reader.qkv()
    yield from reader.head_norms()
    yield from reader.out_of("output", names.output, spec.heads * spec.head_dim, spec.output_bias)
    yield from reader.norm("after_attention_norm", names.after_attention_norm)
    yield from reader.norm("mlp_norm", names.mlp_norm)
    if isinstance(mlp, DenseMlp):
        yield from reader.gate_up("gate_up", names.gate_up, mlp.inner, mlp.has_bias)
        yield from reader.out_of("down", names.down, mlp.inner, mlp.has_bias)
    else:
        yield from reader.experts(mlp)
    yield from reader.norm("after_mlp_norm", names.after_mlp_norm)


def drop_unused(spec: DecoderSpec, source: WeightSource) -> None:
    """Drop the tensors of `source` that no result depends on, so that they are not reported as left over.

    These are rotary frequencies (they are computed), scales of activations and KV (a checkpoint's request to round
    these is ignored), and the weights of the `num_extra_layers` layers after the decoder's last one, which predict
    further tokens."""
    source.drop(".rotary_emb.inv_freq")
    for name in _UNUSED_SCALES:
        source.drop(name)
    for index in range(spec.num_layers, spec.num_layers + spec.num_extra_layers):
        source.drop("", f"model.layers.{index}.")


@dataclass(frozen=True, slots=True)
class _LayerReader:
    spec: DecoderSpec
    source: WeightSource
    prefix: str
    shard: Shard

    def norm(self, part: str, name: str | None) -> NamedMatrices:
        """Yield the weights of a norm of hidden rows; nothing if `name` is None, which means that the layer lacks the
        norm.

        `part`: name of the tensor within the layer. `name`: its name in the checkpoint."""
        if name is not None:
            yield part, self._take(f"{name}.weight", (self.spec.hidden_size,))

    def qkv(self) -> NamedMatrices:
        """Yield the rows of this rank's heads of the projections to queries, keys and values.

        They are one matrix if their formats are equal, else three matrices. Biases follow, if there are any."""
        spec = self.spec
        query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        names, outs = spec.names.qkv, (query, kv, kv)
        weights = self._in_rope_order(self._into(names, outs, "weight"))
        biases = self._in_rope_order(self._into(names, outs, "bias")) if spec.qkv_bias else []
        joined = join_rows(weights)
        if joined is not None:
            yield "qkv", joined
            if biases:
                yield "qkv.bias", join_as_floats(biases)
            return
        for number, weight in enumerate(weights):
            yield f"qkv.{number}", weight
            if biases:
                yield f"qkv.{number}.bias", biases[number]

    def head_norms(self) -> NamedMatrices:
        """Yield the weights of the norms of query heads and of key heads; nothing if the model has no such norms."""
        spec = self.spec
        if spec.query_key_norm == "none":
            return
        heads = (spec.heads, spec.kv_heads) if spec.query_key_norm == "row" else (1, 1)
        for part, name, count in zip(
            ("query_norm", "key_norm"), (spec.names.query_norm, spec.names.key_norm), heads, strict=True
        ):
            yield part, self._ordered(self._take(f"{name}.weight", (count * spec.head_dim,)))

    def gate_up(self, part: str, names: tuple[str, ...], inner: int, has_bias: bool = False) -> NamedMatrices:
        """Yield the gate and up projections of an MLP as one matrix, with this rank's part of the outputs of each.

        `part`: name of the matrix within the layer. `names`: names in the checkpoint. `inner`: number of outputs of
        each projection over all ranks. `has_bias`: whether the projections have biases, which are yielded as a second
        tensor."""
        yield part, join_as_floats(self._into(names, (inner, inner), "weight"))
        if has_bias:
            yield f"{part}.bias", join_as_floats(self._into(names, (inner, inner), "bias"))

    def out_of(self, part: str, name: str, width: int, has_bias: bool = False) -> NamedMatrices:
        """Yield a projection back to the hidden rows, with this rank's part of the inputs; on the first rank also its
        bias.

        `part`: name of the matrix within the layer. `name`: its name in the checkpoint. `width`: number of inputs over
        all ranks. `has_bias`: whether the projection has a bias."""
        yield part, self._down(name, width)
        if has_bias:
            bias = self._take(f"{name}.bias", (self.spec.hidden_size,))
            if self.shard.is_first:
                yield f"{part}.bias", bias

    def experts(self, mlp: ExpertsMlp) -> NamedMatrices:
        """Yield the weights of a mixture of experts: router, matrices of this rank's experts, and the shared MLP if
        there is one.

        Every rank has the whole router."""
        names, hidden, experts = self.spec.names, self.spec.hidden_size, self.shard.experts(mlp.count)
        dtype = torch.float32 if mlp.routes_in_float32 else None
        yield "router", self._take(f"{names.router}.weight", (mlp.count, hidden), dtype)
        if mlp.has_choice_bias:
            yield "choice_bias", self._take(names.choice_bias, (mlp.count,), torch.float32)
        if "{}" in names.expert_down:
            reader = replace(self, shard=self.shard.of_expert)
            # No list outlives its joined copy, which is as large.
            yield (
                "expert_gate_up",
                join_as_floats([half for number in experts for half in reader._expert_gate_up(mlp.inner, str(number))]),
            )
            yield (
                "expert_down",
                join_as_floats([reader._down(names.expert_down.format(number), mlp.inner) for number in experts]),
            )
            if self.shard.has_whole_experts:
                # What is left is of other ranks' experts.
                self.source.drop("", self.prefix + names.expert_down.partition("{}")[0])
        else:
            gate_up = self._take(f"{names.expert_gate_up[0]}.weight", (mlp.count, 2 * mlp.inner, hidden))
            part, own = self.shard.of_expert.part(mlp.inner), slice(experts.start, experts.stop)
            halves = [half[own, part.start : part.stop] for half in gate_up.chunk(2, 1)]
            yield "expert_gate_up", torch.cat(halves, 1).flatten(0, 1)
            down = self._take(f"{names.expert_down}.weight", (mlp.count, hidden, mlp.inner))
            yield "expert_down", down[own, :, part.start : part.stop].flatten(0, 1).contiguous()
        if mlp.shared_inner:
            yield from self.gate_up("shared_gate_up", names.shared_gate_up, mlp.shared_inner)
            yield from self.out_of("shared_down", names.shared_down, mlp.shared_inner)
        if mlp.has_shared_gate:
            yield "shared_gate", self._take(f"{names.shared_gate}.weight", (1, hidden))

    def _expert_gate_up(self, inner: int, number: str) -> list[AnyMatrix]:
        names = tuple(name.format(number) for name in self.spec.names.expert_gate_up)
        return self._into(names, (inner, inner), "weight")

    def _into(self, names: tuple[str, ...], outs: Sequence[int], kind: str) -> list[AnyMatrix]:
        """Read projections of hidden rows and return this rank's part of the outputs of each.

        `outs`: number of outputs of each projection. `names`: tensors of the checkpoint, one for each projection or one
        for all. `kind`: "weight" or "bias"."""
        width = (self.spec.hidden_size,) if kind == "weight" else ()
        parts = [self.shard.part(out) for out in outs]
        if len(names) == len(outs):
            return [
                self._read(f"{name}.{kind}", (out, *width), rows=part)
                for name, out, part in zip(names, outs, parts, strict=True)
            ]
        whole = self._read(f"{names[0]}.{kind}", (sum(outs), *width))
        starts = [sum(outs[:index]) + part.start for index, part in enumerate(parts)]
        return [select_rows(whole, slice(start, start + len(part))) for start, part in zip(starts, parts, strict=True)]

    def _down(self, name: str, width: int) -> AnyMatrix:
        shape = (self.spec.hidden_size, width)
        return self._read(f"{name}.weight", shape, columns=self.shard.part(width))

    def _in_rope_order(self, qkv: list[AnyMatrix]) -> list[AnyMatrix]:
        query, key, value = qkv
        return [self._ordered(query), self._ordered(key), value]

    def _ordered(self, rows: AnyMatrix) -> AnyMatrix:
        """Reorder the components of each head."""
        order = rope_order(self.spec.rope, self.spec.head_dim)
        if order is None:
            return rows
        heads = torch.arange(0, rows.shape[0], self.spec.head_dim)
        return select_rows(rows, (heads[:, None] + order).flatten())

    def _read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> AnyMatrix:
        return self.source.take_stored(f"{self.prefix}{name}", shape, rows, columns)

    def _take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.source.take(f"{self.prefix}{name}", shape, dtype=dtype)
