"""Read the tensors of one decoder layer from a model's weights; projections that read the same input become one
matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tandem.runtime.architectures.spec import DecoderSpec, DenseMlp, ExpertsMlp
from tandem.runtime.parallel.shard import WHOLE, Shard
from tandem.runtime.random_weights import WeightSource
from tandem.runtime.rope_frequencies import rope_order

Named = Iterator[tuple[str, torch.Tensor]]


def read_layer(spec: DecoderSpec, source: WeightSource, index: int, shard: Shard = WHOLE) -> Named:
    """Yield a rank's part of the tensors of decoder layer `index`, as (name within the layer, tensor).

    Each tensor is read from `source` when the iterator reaches it. `shard`: the rank; by default the whole tensors are
    read. Projections of the same input are one matrix: `qkv` and `gate_up`. Components of queries and keys are in the
    order of `rope_order`. Experts are `expert_gate_up` `[E, 2 * inner, hidden]` and `expert_down` `[E, hidden, inner]`.
    Raises TandemError when a tensor is missing or of the wrong shape."""
    reader, names, mlp = _LayerReader(spec, source, f"model.layers.{index}.", shard), spec.names, spec.layers[index].mlp
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
    """Ignore tensors that no result depends on: frequencies, which are computed, scales of activations, which are not
    rounded, and the layers behind the last one, which predict further tokens."""
    source.drop(".rotary_emb.inv_freq")
    source.drop(".input_scale")
    for index in range(spec.num_layers, spec.num_layers + spec.num_extra_layers):
        source.drop("", f"model.layers.{index}.")


@dataclass(frozen=True, slots=True)
class _LayerReader:
    spec: DecoderSpec
    source: WeightSource
    prefix: str
    shard: Shard

    def norm(self, part: str, name: str | None) -> Named:
        """Yield the weights of a norm of hidden rows, unless there is none."""
        if name is not None:
            yield part, self._take(f"{name}.weight", (self.spec.hidden_size,))

    def qkv(self) -> Named:
        """Yield the projections to queries, keys and values as one matrix, split by whole heads."""
        spec = self.spec
        query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        outs = (query, kv, kv)
        yield "qkv", torch.cat(self._in_rope_order(self._into(spec.names.qkv, outs, "weight")))
        if spec.qkv_bias:
            yield "qkv.bias", torch.cat(self._in_rope_order(self._into(spec.names.qkv, outs, "bias")))

    def head_norms(self) -> Named:
        """Yield the weights of the norms of queries and of keys."""
        spec = self.spec
        if spec.query_key_norm == "none":
            return
        heads = (spec.heads, spec.kv_heads) if spec.query_key_norm == "row" else (1, 1)
        for part, name, count in zip(
            ("query_norm", "key_norm"), (spec.names.query_norm, spec.names.key_norm), heads, strict=True
        ):
            yield part, self._ordered(self._take(f"{name}.weight", (count * spec.head_dim,)))

    def gate_up(self, part: str, names: tuple[str, ...], inner: int, has_bias: bool = False) -> Named:
        """Yield the projections to gate and up as one matrix, split by its outputs."""
        yield part, torch.cat(self._into(names, (inner, inner), "weight"))
        if has_bias:
            yield f"{part}.bias", torch.cat(self._into(names, (inner, inner), "bias"))

    def out_of(self, part: str, name: str, width: int, has_bias: bool = False) -> Named:
        """Yield a projection to the hidden rows, split by its inputs; only the first rank has its bias."""
        yield part, self._down(name, width)
        if has_bias:
            bias = self._take(f"{name}.bias", (self.spec.hidden_size,))
            if self.shard.is_first:
                yield f"{part}.bias", bias

    def experts(self, mlp: ExpertsMlp) -> Named:
        """Yield the router, which every rank has whole, the experts, and what all rows pass through."""
        names, hidden = self.spec.names, self.spec.hidden_size
        dtype = torch.float32 if mlp.routes_in_float32 else None
        yield "router", self._take(f"{names.router}.weight", (mlp.count, hidden), dtype)
        if mlp.has_choice_bias:
            yield "choice_bias", self._take(names.choice_bias, (mlp.count,), torch.float32)
        if "{}" in names.expert_down:
            numbers = [str(number) for number in range(mlp.count)]
            yield "expert_gate_up", torch.stack([self._expert_gate_up(mlp.inner, number) for number in numbers])
            downs = [self._down(names.expert_down.format(number), mlp.inner) for number in numbers]
            yield "expert_down", torch.stack(downs)
        else:
            gate_up = self._take(f"{names.expert_gate_up[0]}.weight", (mlp.count, 2 * mlp.inner, hidden))
            part = self.shard.part(mlp.inner)
            yield "expert_gate_up", torch.cat([half[:, part.start : part.stop] for half in gate_up.chunk(2, 1)], 1)
            down = self._take(f"{names.expert_down}.weight", (mlp.count, hidden, mlp.inner))
            yield "expert_down", down[:, :, part.start : part.stop].contiguous()
        if mlp.shared_inner:
            yield from self.gate_up("shared_gate_up", names.shared_gate_up, mlp.shared_inner)
            yield from self.out_of("shared_down", names.shared_down, mlp.shared_inner)
        if mlp.has_shared_gate:
            yield "shared_gate", self._take(f"{names.shared_gate}.weight", (1, hidden))

    def _expert_gate_up(self, inner: int, number: str) -> torch.Tensor:
        names = tuple(name.format(number) for name in self.spec.names.expert_gate_up)
        return torch.cat(self._into(names, (inner, inner), "weight"))

    def _into(self, names: tuple[str, ...], outs: Sequence[int], kind: str) -> list[torch.Tensor]:
        """Read projections of hidden rows with `outs` outputs, each split by them. The checkpoint has one tensor for
        each, or one for all."""
        width = (self.spec.hidden_size,) if kind == "weight" else ()
        parts = [self.shard.part(out) for out in outs]
        if len(names) == len(outs):
            return [
                self.source.take(f"{self.prefix}{name}.{kind}", (out, *width), rows=part)
                for name, out, part in zip(names, outs, parts, strict=True)
            ]
        whole = self._take(f"{names[0]}.{kind}", (sum(outs), *width))
        pieces = torch.split(whole, list(outs))
        return [tensor[part.start : part.stop] for tensor, part in zip(pieces, parts, strict=True)]

    def _down(self, name: str, width: int) -> torch.Tensor:
        shape = (self.spec.hidden_size, width)
        return self.source.take(f"{self.prefix}{name}.weight", shape, columns=self.shard.part(width))

    def _in_rope_order(self, qkv: list[torch.Tensor]) -> list[torch.Tensor]:
        query, key, value = qkv
        return [self._ordered(query), self._ordered(key), value]

    def _ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder the components of each head."""
        order = rope_order(self.spec.rope, self.spec.head_dim)
        if order is None:
            return rows
        return rows.view(-1, self.spec.head_dim, *rows.shape[1:])[:, order.to(rows.device)].reshape(rows.shape)

    def _take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.source.take(f"{self.prefix}{name}", shape, dtype=dtype)
