"""How long a step of a model takes on an accelerator at the least, and what KV fits beside its weights; never a
measurement.

Matrix products take the larger of the time to read their weights and the time to multiply; attention comes on top:
decodes read their context's KV, prompts multiply. Left out: activations, norms, what a chunk reads of the KV before
it, and, with one sequence per prompt, the head's product for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tandem.core.step_cost import StepCost, StepFeatures
from tandem.sim.hardware import Hardware
from tandem.sim.shapes import BF16_BYTES, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The shares of the data sheet that a program reaches, each in (0, 1], and seconds that each step takes besides,
    such as for launching it.

    The first two defaults were measured on an H200: copies at 4.3 of 4.8 TB/s and products at 788 of 989 TFLOP/s. On
    other hardware they are an assumption, as the link's is everywhere. With no overhead the result is a floor.
    """

    memory: float = 4.3 / 4.8
    compute: float = 788 / 989
    link: float = 0.8
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 < share <= 1 for share in (self.memory, self.compute, self.link)) or self.overhead_s < 0:
            raise ValueError(f"shares must lie in (0, 1] and the overhead must not be negative, got {self}")


@dataclass(frozen=True, slots=True)
class Roofline:
    """`shape` cut over `degree` accelerators by heads (tensor parallel): weights, KV and work divide by it, and each
    layer sums its output twice around a ring of their links. Raises ValueError where heads do not divide."""

    shape: ModelShape
    hardware: Hardware
    degree: int = 1
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        if self.degree < 1 or self.shape.kv_heads % self.degree or self.shape.heads % self.degree:
            raise ValueError(f"{self.shape.name} cannot be cut into {self.degree}")

    def seconds(self, step: StepFeatures) -> float:
        """The larger of reading and multiplying, product by product."""
        return self.timer()(step)

    def timer(self) -> Callable[[StepFeatures], float]:
        """`seconds`, with all that no step changes worked out."""
        return partial(_seconds, self.cost(), self._sum_s, self.efficiency.overhead_s)

    def cost(self) -> StepCost:
        """The five coefficients whose sum is never below `seconds`, at most twice it, and close where either reading
        or multiplying is negligible: a schedule's first guess, where `seconds` is the step itself."""
        shape, multiply = self.shape, 1 / (self.degree * self.hardware.flops * self.efficiency.compute)
        read = 1 / (self.degree * self.hardware.memory_bandwidth * self.efficiency.memory)
        kv_bytes = shape.layout(1).token_bytes
        return StepCost(
            base_s=BF16_BYTES * (shape.layer_weights + shape.head_weights) * read + self.efficiency.overhead_s,
            prefill_token_s=2 * shape.layer_weights * multiply + self._sum_s,
            decode_seq_s=2 * (shape.layer_weights + shape.head_weights) * multiply + self._sum_s,
            decode_context_s=kv_bytes * read,
            prefill_pair_s=shape.attention_pair_flops * multiply,
        )

    def num_blocks(self, block_size: int, memory_share: float = 0.9) -> int:
        """KV blocks that fit beside the weights into `memory_share` of the memory. Raises ValueError for none."""
        room = self.degree * self.hardware.memory_bytes * memory_share - self.shape.weight_bytes
        number = int(room // self.shape.layout(block_size).block_bytes)
        if number < 1:
            raise ValueError(f"{self.shape.name} does not fit into {self.degree} x {self.hardware.name}")
        return number

    @property
    def _sum_s(self) -> float:
        """Seconds per token in the sums between accelerators: a ring sends `2 (n - 1) / n` of each vector."""
        num_bytes = 2 * self.shape.layers * self.shape.hidden * BF16_BYTES * 2 * (self.degree - 1) / self.degree
        return num_bytes / (self.hardware.peer_bandwidth * self.efficiency.link)


def _seconds(cost: StepCost, sum_s: float, extra_s: float, step: StepFeatures) -> float:
    products = cost.prefill_token_s * step.num_prefill_tokens + cost.decode_seq_s * step.num_decode_seqs
    sums = sum_s * (step.num_prefill_tokens + step.num_decode_seqs)
    attention = cost.decode_context_s * step.decode_context + cost.prefill_pair_s * step.num_prefill_pairs
    return extra_s + max(cost.base_s - extra_s, products - sums) + sums + attention
