"""How long a step of a model takes on an accelerator at the least, and what KV fits beside its weights; never a
measurement.

Matrix products take the larger of the time to read their weights and the time to multiply; attention comes on top:
decodes read their context's KV, prompts multiply. Left out: activations, norms, what a chunk reads of the KV before
it, and, with one sequence per prompt, the head's product for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tandem.core.step_cost import StepCost, StepFeatures
from tandem.kv.layout import KVLayout
from tandem.sim.cost.hardware import Hardware
from tandem.sim.cost.model_shapes import BYTES, ModelShape, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The shares of the data sheet that a program reaches, each in (0, 1], and seconds that come on top of each step:
    `overhead_s` whatever it computes, `sum_s` for each sum between accelerators.

    The first two defaults were measured on an H200: copies at 4.3 of 4.8 TB/s and products at 788 of 989 TFLOP/s. On
    other hardware they are an assumption, as the link's is everywhere. With no overhead the result is a floor.
    """

    memory: float = 4.3 / 4.8
    compute: float = 788 / 989
    link: float = 0.8
    overhead_s: float = 0.0
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        shares, extra = (self.memory, self.compute, self.link), (self.overhead_s, self.sum_s)
        if not all(0 < share <= 1 for share in shares) or not all(0 <= seconds < math.inf for seconds in extra):
            raise ValueError(f"shares must lie in (0, 1] and seconds must not be negative, got {self}")


SERVING = Efficiency(compute=0.58, overhead_s=1.5e-3, sum_s=8e-6)
"""What a serving engine with captured graphs reaches. Compute: what TensorRT-LLM 1.0's published throughput of Llama
needs, see `fidelity`. Overhead: vLLM 0.21 on an H100 takes 6.48 ms for a token of Llama-3.1-8B in fp16 alone, where
reading the weights takes 5.0 (a public concurrency sweep of May 2026). The time of a sum is an assumption."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """`shape` cut over `degree` accelerators by heads (tensor parallel): weights, KV and work divide by it, and each
    layer sums its output twice around a ring of their links. `weights` is the precision of the layers and of their
    products; attention computes in bf16 whatever `kv` is kept in. Raises ValueError where heads do not divide and for
    fp8 products on hardware without them."""

    shape: ModelShape
    hardware: Hardware
    degree: int = 1
    efficiency: Efficiency = Efficiency()
    weights: Precision = "bf16"
    kv: Precision = "bf16"

    def __post_init__(self) -> None:
        if self.degree < 1 or self.shape.kv_heads % self.degree or self.shape.heads % self.degree:
            heads = f"{self.shape.heads} heads and {self.shape.kv_heads} KV heads"
            raise ValueError(f"{self.shape.name} cannot be cut into {self.degree}: it has {heads}")
        if self.weights == "fp8" and not self.hardware.fp8_flops:
            raise ValueError(f"{self.hardware.name} does not multiply in fp8")

    def seconds(self, step: StepFeatures) -> float:
        """The larger of reading and multiplying, product by product."""
        return self.timer()(step)

    def timer(self) -> Callable[[StepFeatures], float]:
        """`seconds`, with all that no step changes worked out."""
        return partial(_seconds, self.cost(), self._sum_s, self._extra_s)

    def cost(self) -> StepCost:
        """The five coefficients whose sum is never below `seconds`, at most twice it, and close where either reading
        or multiplying is negligible: a schedule's first guess, where `seconds` is the step itself."""
        shape, ways = self.shape, self.degree * self.efficiency.compute
        bf16 = 1 / (ways * self.hardware.flops)
        layers = bf16 if self.weights == "bf16" else 1 / (ways * self.hardware.fp8_flops)
        read = 1 / (self.degree * self.hardware.memory_bandwidth * self.efficiency.memory)
        return StepCost(
            base_s=shape.step_bytes(self.weights) * read + self._extra_s,
            prefill_token_s=2 * shape.layer_weights * layers + self._sum_s,
            decode_seq_s=2 * shape.layer_weights * layers + 2 * shape.head_weights * bf16 + self._sum_s,
            decode_context_s=self.layout(1).token_bytes * read,
            prefill_pair_s=shape.attention_pair_flops * bf16,
        )

    def layout(self, block_size: int) -> KVLayout:
        return self.shape.layout(block_size, self.kv)

    def num_blocks(self, block_size: int, memory_share: float = 0.9) -> int:
        """KV blocks that fit beside the weights into `memory_share` of the memory. Raises ValueError for none."""
        room = self.degree * self.hardware.memory_bytes * memory_share - self.shape.weight_bytes(self.weights)
        number = int(room // self.layout(block_size).block_bytes)
        if number < 1:
            raise ValueError(f"{self.shape.name} does not fit into {self.degree} x {self.hardware.name}")
        return number

    @property
    def _sum_s(self) -> float:
        """Seconds per token in the sums between accelerators: a ring sends `2 (n - 1) / n` of each vector."""
        num_bytes = 2 * self.shape.layers * self.shape.hidden * BYTES["bf16"] * 2 * (self.degree - 1) / self.degree
        return num_bytes / (self.hardware.peer_bandwidth * self.efficiency.link)

    @property
    def _extra_s(self) -> float:
        """Seconds of every step, whatever it computes."""
        sums = 2 * self.shape.layers if self.degree > 1 else 0
        return self.efficiency.overhead_s + sums * self.efficiency.sum_s


def _seconds(cost: StepCost, sum_s: float, extra_s: float, step: StepFeatures) -> float:
    products = cost.prefill_token_s * step.num_prefill_tokens + cost.decode_seq_s * step.num_decode_seqs
    sums = sum_s * (step.num_prefill_tokens + step.num_decode_seqs)
    attention = cost.decode_context_s * step.decode_context + cost.prefill_pair_s * step.num_prefill_pairs
    return extra_s + max(cost.base_s - extra_s, products - sums) + sums + attention
