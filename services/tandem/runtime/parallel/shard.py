"""Compute which part of a model one tensor-parallel rank holds.

The split is that of Megatron-LM (Shoeybi et al. 2019, section 3). Projections into attention and MLP are split by their
outputs, by whole KV heads with the query heads that read them. Projections out of them are split by their inputs, so
that attention and MLP cost one all-reduce each. Experts are either split like an MLP, each over all ranks, or each rank
holds whole experts: after attention every rank has all rows, so it computes the rows of its own experts, and the
all-reduce after the MLP adds up the results. The vocabulary is split by rows; if it does not divide evenly, the last
ranks have fewer rows, or none.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime.architectures.spec import DecoderSpec, ExpertsMlp


@dataclass(frozen=True, slots=True)
class Shard:
    """Position of one tensor-parallel rank, which determines the rank's part of a model.

    `rank`: number of the rank, in [0, `size`). `size`: number of ranks. `has_whole_experts`: whether each expert is
    held whole by one rank instead of being split over all ranks. Raises ValueError for a `rank` out of range."""

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
        """Return the numbers of those experts, among `count` experts of a layer, of which this rank holds the whole or
        a part."""
        return self.part(count) if self.has_whole_experts else range(count)

    @property
    def of_expert(self) -> Shard:
        """Return the shard by which the weights of a single expert are split.

        It is `WHOLE` if ranks hold whole experts, else this shard."""
        return WHOLE if self.has_whole_experts else self

    def vocab(self, vocab_size: int) -> range:
        """Return the token ids whose rows of the embedding table and of the output head this rank holds.

        The last ranks may have fewer ids than the others, or none."""
        each = -(-vocab_size // self.size)
        return range(min(self.rank * each, vocab_size), min((self.rank + 1) * each, vocab_size))


WHOLE = Shard()


def require_divisible(config: DecoderSpec, size: int, *, has_whole_experts: bool = False) -> None:
    """Check that a model can be split over `size` ranks, and raise TandemError that names the obstacle if it cannot.

    `has_whole_experts`: whether each expert is to be held whole by one rank instead of being split over all ranks. An
    obstacle is a size in `config` that is no multiple of `size`, or a feature that does not admit a split."""
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
