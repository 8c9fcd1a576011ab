"""Report how far the predictions of rooflines were from published throughput figures of other systems."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from tandem.sim.cost.hardware import H100, H200, Hardware
from tandem.sim.cost.model_shapes import LLAMA_8B, LLAMA_70B, ModelShape
from tandem.sim.cost.roofline import SERVING, Roofline


@dataclass(frozen=True, slots=True)
class Compared:
    """One published throughput figure beside the simulated one.

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
