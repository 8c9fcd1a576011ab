"""Which part of a model one tensor-parallel rank holds; never loads or computes it.

The split is that of Megatron-LM (Shoeybi et al. 2019, section 3): the projections into attention and MLP by their
outputs, whole KV heads with the query heads that read them, and those out of them by their inputs, so that each of
the two costs one sum over ranks. The vocabulary is split by rows, the last rank having fewer where it does not divide.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime.model_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """`rank` of `size` ranks, from 0 on."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}")

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Of all ranks this one adds what must be added once, and has the logits."""
        return self.rank == 0

    def part(self, total: int) -> range:
        """Of `total` equal things that divide by `size`, those of this rank."""
        each, rest = divmod(total, self.size)
        if rest:
            raise ValueError(f"{total} things do not divide by {self.size}")
        return range(self.rank * each, (self.rank + 1) * each)

    def vocab(self, vocab_size: int) -> range:
        """Token ids of this rank, whose number differs at the end; empty where ranks before it have all."""
        each = -(-vocab_size // self.size)
        return range(min(self.rank * each, vocab_size), min((self.rank + 1) * each, vocab_size))


WHOLE = Shard()


def require_divisible(config: DecoderConfig, size: int) -> None:
    """Raise TandemError unless the model can be split over `size` ranks; names the number that does not divide."""
    parts = {
        "num_key_value_heads": config.kv_heads,
        "num_attention_heads": config.heads,
        "intermediate_size": config.intermediate_size,
    }
    for name, number in parts.items():
        if number % size:
            message = f"tensor_parallel={size}: the model's {name}={number} is no multiple of it"
            raise TandemError(ErrorKind.UNSUPPORTED, message, param="tensor_parallel")
