"""Compute a lower bound of a model's step time on an accelerator, and the KV that fits beside its weights.

Matrix products take the larger of the time to read their weights and the time to multiply. Attention is added to that:
decodes read the KV of their context, prompts multiply. Left out are activations, norms, the earlier KV that a prompt
chunk reads, and the head's product for the last token of each prompt. A step of a mixture of experts reads the experts
that its tokens are expected to pass through if they choose all experts with equal probability; real routers are less
even, so that their tokens pass through fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

from tandem.core.step_cost import StepCost, StepFeatures
from tandem.kv.layout import KVLayout
from tandem.sim.cost.hardware import H100, H200, Hardware
from tandem.sim.cost.model_shapes import BYTES, LLAMA_8B, LLAMA_70B, ModelShape, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the data sheet's figures that a program reaches, each in (0, 1], and seconds added to each step.

    `memory`, `compute`, `link`: shares of the memory bandwidth, of the compute rate and of the bandwidth of links.
    `overhead_s`: seconds added to every step. `sum_s`: seconds added for each all-reduce between accelerators. The
    defaults of `memory` and `compute` were measured on an H200: copies at 4.3 of 4.8 TB/s and products at 788 of 989
    TFLOP/s. On other hardware they are an assumption, and the default of `link` is an assumption on all hardware.
    Without overheads the result is a lower bound. Raises ValueError for a share outside (0, 1] or negative seconds.
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
"""Efficiency of a serving engine with captured CUDA graphs. `compute`: the share that TensorRT-LLM 1.0's published
throughput of Llama needs, see `fidelity`. `overhead_s`: vLLM 0.21 on an H100 takes 6.48 ms per token of
Llama-3.1-8B in fp16 with one sequence, of which reading the weights takes 5.0 ms (a public concurrency sweep of May
2026). `sum_s` is an assumption."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofline of a model on `degree` accelerators of one kind with tensor parallelism.

    Weights, KV and work divide by `degree`, and each layer all-reduces its output twice around a ring of the
    accelerators' links. `weights`: precision of the layers and of their products. `kv`: precision in which KV is
    stored; attention computes in bf16 for either. Raises ValueError where `degree` does not divide the heads, and for
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

    def timer(self) -> Callable[[StepFeatures], float]:
        """Return a function from a step to its seconds: the larger of reading the weights and multiplying, plus
        attention, all-reduces and overheads. What does not depend on the step is computed in advance."""
        experts_s = self.shape.expert_weights * BYTES[self.weights] * self._read_s
        return partial(_seconds, self.cost(), self._sum_s, self._extra_s, experts_s, self.shape)

    @property
    def _read_s(self) -> float:
        """Return the seconds of reading a byte, by all accelerators together."""
        return 1 / (self.degree * self.hardware.memory_bandwidth * self.efficiency.memory)

    def cost(self) -> StepCost:
        """Return a linear step cost, for schedulers to assume before they have measured any step.

        For a dense model its prediction lies between the time of `timer` and twice that, and is close to it where
        either reading or multiplying is negligible. For a mixture of experts it assumes that each step reads all
        experts."""
        shape, compute_units = self.shape, self.degree * self.efficiency.compute
        bf16 = 1 / (compute_units * self.hardware.flops)
        layers = bf16 if self.weights == "bf16" else 1 / (compute_units * self.hardware.fp8_flops)
        read = self._read_s
        return StepCost(
            base_s=shape.step_bytes(self.weights) * read + self._extra_s,
            prefill_token_s=2 * shape.active_weights * layers + self._sum_s,
            decode_seq_s=2 * shape.active_weights * layers + 2 * shape.head_weights * bf16 + self._sum_s,
            decode_context_s=self.layout(1).token_bytes * read,
            prefill_pair_s=shape.attention_pair_flops * bf16,
        )

    def layout(self, block_size: int) -> KVLayout:
        return self.shape.layout(block_size, self.kv)

    def num_blocks(self, block_size: int, memory_share: float = 0.9) -> int:
        """Return how many KV blocks fit beside the weights into `memory_share` of the memory. Raises ValueError when no
        block fits; its message says how many accelerators would hold the model."""
        number = self._num_blocks(self.degree, block_size, memory_share)
        if number < 1:
            shape, name = self.shape, self.hardware.name
            degrees = [n for n in range(1, shape.kv_heads + 1) if shape.kv_heads % n == 0 == shape.heads % n]
            enough = next((n for n in degrees if self._num_blocks(n, block_size, memory_share) > 0), None)
            needed = (
                f"it needs {enough}" if enough else f"its {shape.kv_heads} KV heads allow no more than {degrees[-1]}"
            )
            raise ValueError(f"{shape.name} in {self.weights} does not fit into {self.degree} x {name}: {needed}")
        return number

    def _num_blocks(self, degree: int, block_size: int, memory_share: float) -> int:
        room = degree * self.hardware.memory_bytes * memory_share - self.shape.weight_bytes(self.weights)
        return int(room // self.layout(block_size).block_bytes)

    @property
    def _sum_s(self) -> float:
        """Return the seconds per token of the all-reduces between accelerators: a ring sends `2 (n - 1) / n` of each
        vector."""
        num_bytes = 2 * self.shape.layers * self.shape.hidden * BYTES["bf16"] * 2 * (self.degree - 1) / self.degree
        return num_bytes / (self.hardware.peer_bandwidth * self.efficiency.link)

    @property
    def _extra_s(self) -> float:
        """Return the seconds that every step takes regardless of its contents."""
        sums = 2 * self.shape.layers if self.degree > 1 else 0
        return self.efficiency.overhead_s + sums * self.efficiency.sum_s


def _seconds(
    cost: StepCost, sum_s: float, extra_s: float, experts_s: float, shape: ModelShape, step: StepFeatures
) -> float:
    products = cost.prefill_token_s * step.num_prefill_tokens + cost.decode_seq_s * step.num_decode_seqs
    sums = sum_s * (step.num_prefill_tokens + step.num_decode_seqs)
    attention = cost.decode_context_s * step.decode_context + cost.prefill_pair_s * step.num_prefill_pairs
    reading = cost.base_s - extra_s
    if experts_s:
        reading -= (1 - shape.touched(step.num_prefill_tokens + step.num_decode_seqs)) * experts_s
    return extra_s + max(reading, products - sums) + sums + attention


@dataclass(frozen=True, slots=True)
class Compared:
    """Describe one published throughput figure beside the simulated one.

    `published`, `simulated`: output tokens per second when all requests, each of `prompt` and `output` tokens, arrive
    at once. The simulation has the efficiency `SERVING`, fp8 weights and KV, and steps of up to 8,192 tokens and 2,048
    sequences."""

    shape: ModelShape
    hardware: Hardware
    degree: int
    prompt: int
    output: int
    published: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1


COMPARED = (
    Compared(LLAMA_8B, H200, 1, 128, 128, 27_911, 32_545),
    Compared(LLAMA_8B, H200, 1, 1000, 1000, 17_744, 18_993),
    Compared(LLAMA_8B, H200, 1, 2048, 128, 3_538, 3_843),
    Compared(LLAMA_8B, H200, 1, 5000, 500, 3_902, 3_998),
    Compared(LLAMA_8B, H100, 1, 128, 128, 28_312, 31_243),
    Compared(LLAMA_8B, H100, 1, 1000, 1000, 15_220, 15_682),
    Compared(LLAMA_8B, H100, 1, 2048, 128, 3_450, 3_640),
    Compared(LLAMA_8B, H100, 1, 5000, 500, 3_459, 3_365),
    Compared(LLAMA_70B, H200, 1, 1000, 1000, 2_909, 2_579),
    Compared(LLAMA_70B, H200, 1, 2048, 128, 442, 442),
    Compared(LLAMA_70B, H100, 2, 1000, 1000, 4_205, 4_293),
    Compared(LLAMA_70B, H100, 2, 2048, 128, 762, 775),
)
"""TensorRT-LLM 1.0, performance overview: Llama-3.1-8B and Llama-3.3-70B, which has 3.1's sizes, in fp8."""


def fidelity(roofline: Roofline) -> str:
    """Return a sentence about the known prediction errors for this model on this hardware."""
    if roofline.efficiency != SERVING:
        return "unknown: nothing was compared with this efficiency"
    errors = [one.error for one in COMPARED]
    errors_text = (
        f"{min(errors):+.0%} to {max(errors):+.0%}, median {median(errors):+.0%}, in {len(errors)} figures of offline "
        "throughput that TensorRT-LLM 1.0 published (Llama 8B and 70B in fp8 on H100 and H200); its share of compute "
        "was set on these, and latencies were not compared"
    )
    if any((one.shape, one.hardware.name) == (roofline.shape, roofline.hardware.name) for one in COMPARED) and (
        roofline.weights == roofline.kv == "fp8"
    ):
        return errors_text
    return f"unknown for this model, precision and hardware; elsewhere {errors_text}"
