"""Run the forward pass of any `DecoderSpec` on any set of kernels, whole or as one tensor-parallel rank.

Operations and casts are in the order of the checkpoints' reference implementation (transformers), so that hidden rows
agree with it up to the order of sums inside a matrix product; in half types, OLMo2's norms and Mixtral's router are
rounded once more. Projections that read the same input are one matrix.

With tensor parallelism a rank holds a part of each matrix, see `runtime.parallel.shard`. The outputs of attention and
MLP are summed over all ranks; only the first rank adds their biases. Embeddings are split by rows like the output head:
tied models have one table for both, and a full copy on each rank would take memory from the KV pool to save one of many
all-reduces per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tandem.runtime.architectures.spec import DecoderSpec, DenseMlp
from tandem.runtime.architectures.stored_format import AnyMatrix
from tandem.runtime.input_batch import Batch
from tandem.runtime.int8 import head_group, layer_group, rounded
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.layer_tensors import drop_unused, read_layer
from tandem.runtime.parallel.communicator import ALONE, Communicator
from tandem.runtime.parallel.shard import WHOLE, Shard
from tandem.runtime.random_weights import WeightSource
from tandem.runtime.rope_frequencies import inverse_frequencies
from tandem_kernels.contract import ExpertRouting, HeadNorms
from tandem_kernels.device_codes import DeviceCodes
from tandem_kernels.dispatch import REFERENCE, Kernels, Weight
from tandem_kernels.reference.coded import CodedMatrix, linear_codes, round_to_float8
from tandem_kernels.reference.experts import mix_experts
from tandem_kernels.reference.linear_int8 import GROUP

AnyWeight = Weight | CodedMatrix
AnyProduct = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
"""Function that multiplies rows with a weight of its own form and adds a bias, if there is one."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layer: called with rows `[T, in]`, it returns rows `[T, out]`.

    `product`: function that computes the result. `weight`: `[out, in]`, in the form that `product` takes: floats, codes
    that stand for floats, or integers of at most 8 bits. `bias`: `[out]`, or None.
    """

    product: AnyProduct
    weight: AnyWeight
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Linear layers that read the same rows `[T, in]`; their results are concatenated to rows `[T, sum of all out]`."""

    layers: tuple[Linear, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=1)


AnyLinear = Linear | SideBySide


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Gated MLP: `gate_up` computes gate and up projections of hidden rows side by side, `down` projects back to hidden
    rows."""

    gate_up: AnyLinear
    down: AnyLinear

    def __call__(self, rows: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return self.down(kernels.silu_mul(self.gate_up(rows)))


@dataclass(frozen=True, slots=True)
class MixtureMlp:
    """Mixture of experts, called with rows `[T, hidden]`.

    `routing`: how the experts of a row are chosen and weighted. `router` `[experts, hidden]`: weights of the scores, in
    the rows' dtype or in float32. `choice_bias` `[experts]`: added to the scores for the choice of experts only; None:
    no bias. `gate_up`, `down`: matrices of this rank's experts, as one weight for `contract.mix_experts`, or as a list
    of integer matrices, one per expert. `shared`: MLP that every row passes through, or None. `shared_gate` `[1,
    hidden]`: weights of a gate; the result of `shared` is multiplied by the sigmoid of their product with the row;
    None: no gate. `here`: numbers of the experts that this rank holds."""

    routing: ExpertRouting
    router: torch.Tensor
    choice_bias: torch.Tensor | None
    gate_up: Weight | list[CodedMatrix]
    down: Weight | list[CodedMatrix]
    shared: GatedMlp | None
    shared_gate: torch.Tensor | None
    here: range
    tokens: torch.Tensor
    """int64 `[experts, K]`, where K experts are chosen for each token: how many tokens chose each expert of the whole
    model so far, as first to K-th choice. With a column per choice one kernel adds the counts of a step."""

    def __call__(self, rows: torch.Tensor, kernels: Kernels, counts: torch.Tensor) -> torch.Tensor:
        """Return the mixture of each row. `counts`: int64 `[T, 1]`, 1 for a row of a token and 0 for padding."""
        logits = kernels.linear(rows.to(self.router.dtype), self.router, None)
        experts, weights = kernels.route(logits, self.choice_bias, self.routing)
        self.tokens.scatter_add_(0, experts, counts.expand_as(experts))
        if len(self.here) < len(self.router):
            is_here = (experts >= self.here.start) & (experts < self.here.stop)
            experts = torch.where(is_here, experts - self.here.start, -1)
        if not isinstance(self.gate_up, list) and not isinstance(self.down, list):
            mixed = kernels.mix_experts(rows, experts, weights, self.gate_up, self.down)
        else:
            linear, silu_mul = linear_codes, kernels.silu_mul
            mixed = mix_experts(rows, experts, weights, self.gate_up, self.down, linear=linear, silu_mul=silu_mul)
        if self.shared is None:
            return mixed
        shared = self.shared(rows, kernels)
        if self.shared_gate is not None:
            shared = torch.sigmoid(kernels.linear(rows, self.shared_gate, None)) * shared
        return mixed + shared


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer.

    `has_rope`: whether queries and keys are rotated. `attention_norm`, `mlp_norm`: norms before attention and MLP.
    `after_attention_norm`, `after_mlp_norm`: norms of the results of attention and MLP. A norm that the layer lacks is
    None. `qkv` computes query, key and value heads side by side; `output` projects the result of attention back to
    hidden rows. `head_norms`: norms of each query and key head by itself; `row_norms`: norms of all query heads and of
    all key heads of a row together; None if the model has no such norms."""

    has_rope: bool
    attention_norm: torch.Tensor | None
    qkv: AnyLinear
    row_norms: HeadNorms | None
    head_norms: HeadNorms | None
    output: AnyLinear
    after_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: GatedMlp | MixtureMlp
    after_mlp_norm: torch.Tensor | None


class Decoder:
    """Decoder of any specification, in any floating-point type and on any set of kernels.

    Implements `runtime.models.causal.CausalModel`. `config`: specification of the whole model. With tensor parallelism
    the decoder holds the weights of its `shard`, and the caches passed to it hold the shard's KV heads. All ranks must
    call `forward` and `logits` together, because each waits for the others."""

    def __init__(
        self,
        config: DecoderSpec,
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
        inv_freq, self._rope_scale = inverse_frequencies(config.rope, config.head_dim)
        self._ids = shard.vocab(config.vocab_size)
        self._num_ids = len(Shard(0, shard.size).vocab(config.vocab_size))
        table = "model.embed_tokens.weight"
        rounded_head: CodedMatrix | None = None
        if is_int8 and config.tied_embeddings:
            rounded_head = self._take_rounded(checkpoint, table)
            self._embeddings = rounded_head.floats()
        else:
            self._embeddings = self._take_table(checkpoint, table)
        self.dtype = self._embeddings.dtype
        self._inv_freq = inv_freq.to(self._embeddings.device)
        parts = _Parts(linear_codes, _rounded_weight)
        if not is_int8:
            to_weight = partial(_to_weight, kernels, self._embeddings, rounds_rows=quantization == "fp8")
            parts = _Parts(kernels.linear, to_weight)
        self._layers = tuple(_make_layer(config, checkpoint, index, parts, shard) for index in range(config.num_layers))
        self._norm = checkpoint.take("model.norm.weight", (config.hidden_size,))
        drop_unused(config, checkpoint)
        head: AnyWeight = self._embeddings if rounded_head is None else rounded_head
        if config.tied_embeddings:
            checkpoint.drop("lm_head.weight")
        elif is_int8:
            head = self._take_rounded(checkpoint, "lm_head.weight")
        else:
            head = self._take_head(checkpoint, "lm_head.weight")
        self._head = Linear(parts.product, head)
        checkpoint.finish()
        self._has_experts = any(isinstance(layer.mlp, MixtureMlp) for layer in self._layers)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Run the layers over a batch and return the hidden rows before the final norm, `[T, hidden]`, on every rank.

        Attention reads the sequences' earlier KV from `cache`; the KV of the batch's T rows is written there. With
        tensor parallelism it raises CollectiveFailed when another rank fails."""
        kernels, config, all_reduce = self._kernels, self.config, self._communicator.all_reduce
        # Tokens of each row, for mixtures only. A row without a slot pads the batch of a CUDA graph.
        counts = (batch.slots >= 0).long()[:, None] if self._has_experts else batch.slots
        x = self._embed(batch.tokens)
        if config.embedding_multiplier != 1:
            x = x * config.embedding_multiplier
        tables = kernels.rope_tables(batch.positions, self._inv_freq, self._rope_scale, x.dtype)
        # Angles of zero leave queries and keys as they are.
        identity = tables
        if not all(layer.has_rope for layer in config.layers):
            identity = kernels.rope_tables(batch.positions, torch.zeros_like(self._inv_freq), 1.0, x.dtype)
        first = self._layers[0].attention_norm
        rows = x if first is None else kernels.rms_norm(x, first, config.rms_norm_eps)
        for index, (layer, kv) in enumerate(zip(self._layers, cache.layers, strict=True), start=1):
            qkv = layer.qkv(rows)
            if layer.row_norms is not None:
                qkv = _normalised(qkv, layer.row_norms, kernels)
            cos, sin = tables if layer.has_rope else identity
            query = kernels.rope_cache_write(qkv, cos, sin, layer.head_norms, kv, batch.slots)
            mixed = kernels.paged_attention(query, kv, batch.attention, config.attention_scale)
            out = all_reduce(layer.output(mixed.flatten(1)))
            rows, x = self._add(out, x, layer.after_attention_norm, layer.mlp_norm)
            mlp = layer.mlp
            out = all_reduce(mlp(rows, kernels, counts) if isinstance(mlp, MixtureMlp) else mlp(rows, kernels))
            is_last = index == len(self._layers)
            following = None if is_last else self._layers[index].attention_norm
            rows, x = self._add(out, x, layer.after_mlp_norm, following)
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return next-token logits `[rows, vocab]` of hidden rows that `forward` returned.

        With tensor parallelism the first rank's `hidden` is broadcast to the other ranks and overwrites their `hidden`.
        The first rank returns the logits of the whole vocabulary; each other rank returns those of its part of the
        vocabulary."""
        hidden = self._communicator.broadcast(hidden)
        logits = self._head(self._kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps))
        if self.config.logits_divisor != 1:
            logits = logits / self.config.logits_divisor
        if self._shard.is_whole:
            return logits
        parts = self._communicator.gather(logits)
        return logits if parts is None else torch.cat(parts, 1)[:, : self.config.vocab_size]

    def expert_tokens(self) -> Mapping[int, Sequence[int]]:
        """Return how many tokens each expert has computed so far, by the index of the layer.

        On every rank, the counts cover all experts of the whole model. They are copied from the device without starting
        a kernel, because a kernel might wait for a running step. Raises RuntimeError when the device has failed."""
        mixtures = {i: layer.mlp for i, layer in enumerate(self._layers) if isinstance(layer.mlp, MixtureMlp)}
        return {i: mlp.tokens.cpu().sum(1).tolist() for i, mlp in mixtures.items()}

    def _add(
        self, out: torch.Tensor, x: torch.Tensor, after: torch.Tensor | None, following: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `out`, the result of attention or an MLP, to the hidden rows `x`; return the input of the next part, and
        the sum.

        `after`: norm that is applied to `out` before the addition. `following`: norm that is applied to the sum to get
        the input of the next part, attention or MLP; None: that input is the sum itself."""
        config, kernels = self.config, self._kernels
        if after is not None:
            out = kernels.rms_norm(out, after, config.rms_norm_eps)
        if config.residual_multiplier != 1:
            out = out * config.residual_multiplier
        if following is not None:
            return kernels.add_rms_norm(out, x, following, config.rms_norm_eps)
        total = x + out
        return total, total

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens, `[T, hidden]`.

        With tensor parallelism they are summed over ranks; all but one rank contribute zeros, so the sum is exact."""
        if self._shard.is_whole:
            return F.embedding(tokens, self._embeddings)
        places = tokens - self._ids.start
        is_elsewhere = (places < 0) | (places >= len(self._ids))
        rows = F.embedding(places.masked_fill(is_elsewhere, 0), self._embeddings)
        return self._communicator.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))

    def _take_rounded(self, checkpoint: WeightSource, name: str) -> CodedMatrix:
        """Load a table of all token ids as integers of at most 8 bits."""
        table = checkpoint.take_stored(name, (self.config.vocab_size, self.config.hidden_size))
        return rounded(table, head_group(self.config.hidden_size))

    def _take_table(self, checkpoint: WeightSource, name: str) -> torch.Tensor:
        """Load the rows of this rank's token ids, `[ids per rank, hidden]`.

        Rows behind the last id are zeros, so that all ranks have the same shape."""
        table = checkpoint.take(name, (self.config.vocab_size, self.config.hidden_size), rows=self._ids)
        return table if len(table) == self._num_ids else F.pad(table, (0, 0, 0, self._num_ids - len(table)))

    def _take_head(self, checkpoint: WeightSource, name: str) -> Weight:
        """Load the rows of this rank's token ids like `_take_table`, but as codes if the checkpoint stores codes and
        this rank has as many ids as the others."""
        if len(self._ids) < self._num_ids:
            return self._take_table(checkpoint, name)
        table = checkpoint.take_stored(name, (self.config.vocab_size, self.config.hidden_size), rows=self._ids)
        # Its errors would affect every token, so that it is never rounded.
        return _to_weight(self._kernels, self._embeddings, table, rounds_rows=False)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Make the parts of a layer with matrices in the form that `to_weight` returns and `product` takes."""

    product: AnyProduct
    to_weight: Callable[[AnyMatrix], AnyWeight]

    def linear(self, matrix: AnyMatrix, bias: torch.Tensor | None) -> Linear:
        return Linear(self.product, self.to_weight(matrix), bias)

    def experts(self, matrix: AnyMatrix, count: int) -> Weight | list[CodedMatrix]:
        """Return the matrices of `count` experts, which `matrix` holds one below the other, as one weight, or as a list
        where they are integers of at most 8 bits."""
        whole = self.to_weight(matrix)
        if isinstance(whole, CodedMatrix):
            size = whole.shape[0] // count
            return [whole.rows(slice(start, start + size)) for start in range(0, whole.shape[0], size)]
        return whole.split_rows(count) if isinstance(whole, DeviceCodes) else whole.view(count, -1, whole.shape[1])


def _rounded_weight(matrix: AnyMatrix) -> CodedMatrix:
    """Return a layer's matrix as integers of at most 8 bits, as the checkpoint has them or rounded to int8."""
    return rounded(matrix, layer_group(matrix.shape[1]))


def _to_weight(kernels: Kernels, like: torch.Tensor, matrix: AnyMatrix, *, rounds_rows: bool) -> Weight:
    """Return a matrix in the form that `kernels` take, with the dtype and device of `like`.

    `rounds_rows`: whether products with the matrix round their input rows to float8; a matrix of floats is then rounded
    to float8 too."""
    if rounds_rows and isinstance(matrix, torch.Tensor) and matrix.shape[1] % GROUP == 0:
        matrix = round_to_float8(matrix)
    weight = kernels.to_weight(matrix, like.device, like.dtype) if isinstance(matrix, CodedMatrix) else matrix.to(like)
    return weight.with_rounded_rows() if rounds_rows and isinstance(weight, DeviceCodes) else weight


def _make_layer(config: DecoderSpec, checkpoint: WeightSource, index: int, parts: _Parts, shard: Shard) -> Layer:
    """Build a rank's part of a layer."""
    spec, tensors = config.layers[index], dict(read_layer(config, checkpoint, index, shard))

    def vector(name: str) -> torch.Tensor | None:
        found = tensors.get(name)
        assert not isinstance(found, CodedMatrix)
        return found

    def one(name: str) -> Linear:
        # A matrix that was read may be freed once its part is made.
        return parts.linear(tensors.pop(name), vector(f"{name}.bias"))

    def linear(name: str) -> AnyLinear:
        return one(name) if name in tensors else SideBySide(tuple(one(f"{name}.{number}") for number in range(3)))

    norms = None
    if config.query_key_norm != "none":
        query, key = vector("query_norm"), vector("key_norm")
        assert query is not None and key is not None
        norms = HeadNorms(query, key, config.rms_norm_eps)
    if isinstance(spec.mlp, DenseMlp):
        mlp: GatedMlp | MixtureMlp = GatedMlp(linear("gate_up"), linear("down"))
    else:
        router, count = vector("router"), len(shard.experts(spec.mlp.count))
        assert router is not None
        mlp = MixtureMlp(
            routing=spec.mlp.routing,
            router=router,
            choice_bias=vector("choice_bias"),
            gate_up=parts.experts(tensors.pop("expert_gate_up"), count),
            down=parts.experts(tensors.pop("expert_down"), count),
            shared=GatedMlp(linear("shared_gate_up"), linear("shared_down")) if spec.mlp.shared_inner else None,
            shared_gate=vector("shared_gate"),
            here=shard.experts(spec.mlp.count),
            tokens=router.new_zeros((spec.mlp.count, spec.mlp.routing.num_chosen), dtype=torch.int64),
        )
    return Layer(
        has_rope=spec.has_rope,
        attention_norm=vector("attention_norm"),
        qkv=linear("qkv"),
        row_norms=norms if config.query_key_norm == "row" else None,
        head_norms=norms if config.query_key_norm == "head" else None,
        output=linear("output"),
        after_attention_norm=vector("after_attention_norm"),
        mlp_norm=vector("mlp_norm"),
        mlp=mlp,
        after_mlp_norm=vector("after_mlp_norm"),
    )


def _normalised(qkv: torch.Tensor, norms: HeadNorms, kernels: Kernels) -> torch.Tensor:
    """Return `qkv` with all query heads of a row normalised together, and all its key heads."""
    query, key = len(norms.query), len(norms.key)
    normed = (
        kernels.rms_norm(qkv[:, :query].contiguous(), norms.query, norms.eps),
        kernels.rms_norm(qkv[:, query : query + key].contiguous(), norms.key, norms.eps),
    )
    return torch.cat((*normed, qkv[:, query + key :]), dim=1)
