"""Compute which part of a model one tensor-parallel rank holds.

The split is that of Megatron-LM (Shoeybi et al. 2019, section 3). Projections into attention and MLP are split by their
outputs, by whole KV heads with the query heads that read them. Projections out of them are split by their inputs, so
that attention and MLP cost one all-reduce each. Experts are split like an MLP, each over all ranks, or a rank holds
whole experts: after attention every rank has all rows, so it computes those of its own experts, and the same all-reduce
adds them up. The vocabulary is split by rows; the last ranks have fewer rows, or
none, if it does not divide evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime.architectures.spec import DecoderSpec, ExpertsMlp


@dataclass(frozen=True, slots=True)
class Shard:
    """Number of one tensor-parallel rank, from which its part of a model follows.

    `rank` is in [0, `size`), where `size` is the number of ranks. `has_whole_experts`: an expert is on one rank. Raises
    ValueError for another rank."""

    rank: int = 0
    size: int = 1
    has_whole_experts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}")

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0.

        Only rank 0 adds the biases after attention and MLP, and receives the logits of the whole vocabulary."""
        return self.rank == 0

    def part(self, total: int) -> range:
        """Return the indices, of `total` items such as heads or rows, that this rank holds.

        Raises ValueError unless `total` is a multiple of `size`."""
        each, rest = divmod(total, self.size)
        if rest:
            raise ValueError(f"{total} items do not divide by {self.size}")
        return range(self.rank * each, (self.rank + 1) * each)

    def experts(self, count: int) -> range:
        """Return the numbers of the experts, of `count`, that this rank holds or has a part of."""
        return self.part(count) if self.has_whole_experts else range(count)

    @property
    def of_expert(self) -> Shard:
        """Return what part of each of its experts this rank holds."""
        return WHOLE if self.has_whole_experts else self

    def vocab(self, vocab_size: int) -> range:
        """Return the token ids whose rows of the embedding table and of the output head this rank holds.

        The last ranks may have fewer ids than the others, or none."""
        each = -(-vocab_size // self.size)
        return range(min(self.rank * each, vocab_size), min((self.rank + 1) * each, vocab_size))


WHOLE = Shard()


def require_divisible(config: DecoderSpec, size: int, *, has_whole_experts: bool = False) -> None:
    """Check that a model can be split over `size` ranks, with each expert on one of them or on all.

    Raises TandemError that names the size in `config` that is no multiple of it."""
    if has_whole_experts and not config.has_experts:
        message = f"engine.enable_expert_parallel must be false for {config.model_type}, which has no experts"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="enable_expert_parallel")
    if size > 1 and config.query_key_norm == "row":
        message = f"engine.tensor_parallel must be 1 for {config.model_type}: it normalises all heads of a row together"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="tensor_parallel")
    parts = [("num_key_value_heads", config.kv_heads), ("num_attention_heads", config.heads)]
    for mlp in dict.fromkeys(layer.mlp for layer in config.layers):
        if isinstance(mlp, ExpertsMlp):
            of_expert = ("number of experts", mlp.count) if has_whole_experts else ("width of an expert", mlp.inner)
            parts += [of_expert, ("width of the shared expert", mlp.shared_inner)]
        else:
            parts.append(("intermediate_size", mlp.inner))
    for name, number in parts:
        if number % size:
            message = f"engine.tensor_parallel={size} must divide the model's {name}={number}"
            raise TandemError(ErrorKind.UNSUPPORTED, message, param="tensor_parallel")
