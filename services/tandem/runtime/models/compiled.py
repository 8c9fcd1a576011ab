"""Run models on the compiled CPU kernels, with weights as precise as in the checkpoint or rounded to int8.

`tandem.runtime.models.decoder` is the reference: hidden rows and logits agree with it up to the order of sums. Results
are also batch-invariant: a row has the same bits whatever other rows share its step, because the kernels keep one order
of operations per row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

from tandem.runtime.architectures.spec import DecoderSpec, DenseMlp, ExpertsMlp
from tandem.runtime.atomic_dir import build_once
from tandem.runtime.checkpoint import Checkpoint
from tandem.runtime.fingerprint import architecture_digest
from tandem.runtime.input_batch import Batch
from tandem.runtime.kv_cache import KVCache
from tandem.runtime.layer_tensors import Named
from tandem.runtime.mmap_tensors import read_tensors, write_tensors
from tandem.runtime.progress import ByteProgress, ProgressLine
from tandem.runtime.rope_frequencies import inverse_frequencies
from tandem.runtime.weight_packing import Packing, pack
from tandem_kernels.native.decoder import (
    CompiledDecoder,
    DecoderShape,
    PackedExperts,
    PackedLayer,
    PackedLinear,
    PackedMlp,
)
from tandem_kernels.native.library import MAX_SCALE_PARTS, Team
from tandem_kernels.native.pack import PANEL
from tandem_kernels.native.pack_codes import CodeFormat, PackedMatrix
from tandem_kernels.reference import rope_tables

_log = logging.getLogger(__name__)

_FORMAT = 5
"""Version of the packed files, part of their directory's name; raise it when their content changes."""


class CompiledModel:
    """Model in float32 on the compiled CPU kernels; implements `runtime.models.causal.CausalModel`.

    `packing`: storage format of the weights. `team`: threads on which the kernels run."""

    def __init__(self, config: DecoderSpec, weights: Mapping[str, torch.Tensor], packing: Packing, team: Team) -> None:
        """Build the decoder. `weights` are those that `packed_weights` returns for `packing`."""
        self.config = config
        self.dtype = torch.float32
        layers = [_layer(config, weights, i) for i in range(config.num_layers)]
        self._expert_tokens = {
            i: layer.mlp.tokens for i, layer in enumerate(layers) if not isinstance(layer.mlp, PackedMlp)
        }
        self._decoder = CompiledDecoder(
            shape_of(config),
            layers,
            weights["norm"],
            _linear(weights, "head", config.vocab_size, config.hidden_size),
            None if config.tied_embeddings else _linear(weights, "embeddings", config.vocab_size, config.hidden_size),
            team,
            quantizes_rows=packing is Packing.INT8,
        )
        self._inv_freq, self._rope_scale = inverse_frequencies(config.rope, config.head_dim)
        self._rope = self._tables(0)

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Return the hidden rows of a batch before the final norm, as `CausalModel.forward` does."""
        end = max(batch.attention.context_lens.tolist(), default=0)
        if end > len(self._rope[0]):
            self._rope = self._tables(end)
        return self._decoder.forward(
            batch.tokens, batch.positions, batch.slots, batch.attention, cache.pool, self._rope
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return next-token logits `[rows, vocab]` of hidden rows, as `CausalModel.logits` does."""
        return self._decoder.logits(hidden.contiguous())

    def expert_tokens(self) -> Mapping[int, Sequence[int]]:
        """Return how many tokens each expert has computed, by layer, as `CausalModel.expert_tokens` does."""
        return {layer: tokens.tolist() for layer, tokens in self._expert_tokens.items()}

    def _tables(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute cosines and sines of at least `num_positions` positions, `[positions, head_dim / 2]` each."""
        count = max(1024, 1 << (num_positions - 1).bit_length())
        cos, sin = rope_tables(torch.arange(count), self._inv_freq, self._rope_scale, torch.float32)
        half = self.config.head_dim // 2
        return cos[:, :half].contiguous(), sin[:, :half].contiguous()

    def __repr__(self) -> str:
        return f"CompiledModel({self._decoder!r})"


def shape_of(config: DecoderSpec) -> DecoderShape:
    """Return the sizes of a model in the form that the compiled kernels take."""
    mixtures = [layer.mlp for layer in config.layers if isinstance(layer.mlp, ExpertsMlp)]
    inners = {layer.mlp.inner for layer in config.layers} | {mlp.shared_inner for mlp in mixtures}
    return DecoderShape(
        hidden=config.hidden_size,
        inners=frozenset(inners),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        layers=config.num_layers,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        attention_scale=config.attention_scale,
        has_row_norms=config.query_key_norm == "row",
        embedding_multiplier=config.embedding_multiplier,
        residual_multiplier=config.residual_multiplier,
        logits_divisor=config.logits_divisor,
    )


def packed_weights(
    open_checkpoint: Callable[[], Checkpoint], config: DecoderSpec, packing: Packing, digest: str, cache_dir: Path
) -> Mapping[str, torch.Tensor]:
    """Return the memory-mapped tensors of a model in the format of the compiled kernels.

    On first use they are packed from the checkpoint that `open_checkpoint` opens, and stored below `cache_dir`.
    `packing`: storage format of the matrices. `digest`: the checkpoint's weights digest, part of the name in the cache.
    Raises TandemError when a tensor is missing, left over or of the wrong shape."""

    def build(folder: Path) -> None:
        _log.info("packing the weights")
        line = ProgressLine("weights")
        with closing(line), open_checkpoint() as checkpoint:
            packed = ByteProgress("packing", checkpoint.num_bytes, line)
            write_tensors(folder, _counted(pack(config, checkpoint, packing), packed))
            checkpoint.finish()

    name = f"{digest[:32]}-{architecture_digest(config)[:16]}-{packing}-{_FORMAT}"
    return read_tensors(build_once(cache_dir / "packed" / name, build))


def _counted(tensors: Named, progress: ByteProgress) -> Named:
    for name, tensor in tensors:
        progress(tensor.nbytes)
        yield name, tensor


def _layer(config: DecoderSpec, weights: Mapping[str, torch.Tensor], index: int) -> PackedLayer:
    prefix, layer = f"layers.{index}.", config.layers[index]
    hidden, query = config.hidden_size, config.heads * config.head_dim
    kv = config.kv_heads * config.head_dim
    if f"{prefix}qkv" in weights:
        qkv: tuple[PackedLinear, ...] = (_linear(weights, f"{prefix}qkv", query + 2 * kv, hidden),)
    else:
        qkv = tuple(_linear(weights, f"{prefix}qkv.{part}", n, hidden) for part, n in enumerate((query, kv, kv)))
    packed: PackedMlp | PackedExperts
    if isinstance(layer.mlp, DenseMlp):
        packed = _mlp(weights, prefix, layer.mlp.inner, hidden)
    else:
        packed = _experts(weights, prefix, layer.mlp, hidden)
    return PackedLayer(
        has_rope=layer.has_rope,
        attention_norm=weights.get(f"{prefix}attention_norm"),
        qkv=qkv,
        query_norm=weights.get(f"{prefix}query_norm"),
        key_norm=weights.get(f"{prefix}key_norm"),
        output=_linear(weights, f"{prefix}output", hidden, query),
        after_attention_norm=weights.get(f"{prefix}after_attention_norm"),
        mlp_norm=weights.get(f"{prefix}mlp_norm"),
        mlp=packed,
        after_mlp_norm=weights.get(f"{prefix}after_mlp_norm"),
    )


def _mlp(weights: Mapping[str, torch.Tensor], prefix: str, inner: int, hidden: int) -> PackedMlp:
    gate_up = _linear(weights, f"{prefix}gate_up", 2 * inner, hidden)
    return PackedMlp(inner, gate_up, _linear(weights, f"{prefix}down", hidden, inner))


def _experts(weights: Mapping[str, torch.Tensor], prefix: str, mlp: ExpertsMlp, hidden: int) -> PackedExperts:
    return PackedExperts(
        count=mlp.count,
        inner=mlp.inner,
        routing=mlp.routing,
        router=_linear(weights, f"{prefix}router", mlp.count, hidden),
        choice_bias=weights.get(f"{prefix}choice_bias"),
        gate_up=_linear(weights, f"{prefix}expert_gate_up", mlp.count * 2 * mlp.inner, hidden),
        down=_linear(weights, f"{prefix}expert_down", mlp.count * -(-hidden // PANEL) * PANEL, mlp.inner),
        shared=_mlp(weights, f"{prefix}shared_", mlp.shared_inner, hidden) if mlp.shared_inner else None,
        shared_gate=weights.get(f"{prefix}shared_gate"),
        tokens=torch.zeros(mlp.count, dtype=torch.int64),
    )


def _linear(weights: Mapping[str, torch.Tensor], name: str, n: int, k: int) -> PackedLinear:
    names = (f"{name}.scales.{number}" for number in range(MAX_SCALE_PARTS))
    scales = tuple(weights[part] for part in names if part in weights)
    format = weights.get(f"{name}.format")
    packed = PackedMatrix(weights[name], scales, None if format is None else CodeFormat(*format.tolist()))
    return PackedLinear(packed, n, k, weights.get(f"{name}.bias"))
