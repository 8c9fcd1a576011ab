"""The roofline gives the figures that were computed for it independently.

Llama-3.1-8B in bf16 on one H200 at 4.3 TB/s and 788 TFLOP/s, each product by the larger of reading and multiplying.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.step_cost import StepFeatures
from tandem.sim.cost.hardware import A100, H200, HARDWARE, L40S, Hardware
from tandem.sim.cost.model_shapes import LLAMA_8B, LLAMA_70B, QWEN_8B, QWEN_32B, SHAPES, SMOLLM_135M, ModelShape
from tandem.sim.cost.roofline import Efficiency, Roofline

FLOOR = Roofline(LLAMA_8B, H200)


def decodes(batch: int, context: int = 1024) -> StepFeatures:
    return StepFeatures(num_decode_seqs=batch, decode_context=batch * context)


def prompt(num_tokens: int) -> StepFeatures:
    return StepFeatures(num_prefill_tokens=num_tokens, num_prefill_pairs=num_tokens * (num_tokens + 1) // 2)


@pytest.mark.parametrize(
    ("step", "milliseconds"),
    [(decodes(1), 3.52), (decodes(32), 4.49), (decodes(256), 12.87), (prompt(2048), 37.7), (prompt(8192), 167.4)],
)
def test_known_floors_of_llama_on_an_h200(step: StepFeatures, milliseconds: float) -> None:
    assert FLOOR.seconds(step) * 1e3 == pytest.approx(milliseconds, rel=2e-3)


def test_weights_turn_from_memory_to_compute_bound_at_183_sequences() -> None:
    cost = FLOOR.cost()
    assert cost.base_s / cost.decode_seq_s == pytest.approx(183, rel=5e-3)


def test_weights_and_kv_have_the_known_sizes() -> None:
    assert LLAMA_8B.layer_weights == pytest.approx(6.979e9, rel=1e-3)
    assert LLAMA_8B.head_weights == pytest.approx(0.525e9, rel=1e-3)
    assert LLAMA_8B.layout(1).token_bytes == 131_072
    totals = {LLAMA_8B: 8.03e9, LLAMA_70B: 70.6e9, QWEN_8B: 8.19e9, QWEN_32B: 32.8e9, SMOLLM_135M: 134.5e6}
    for shape, num_weights in totals.items():
        assert shape.weight_bytes() / 2 == pytest.approx(num_weights, rel=5e-3), shape.name


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda s: s.name)
@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=lambda h: h.name)
def test_the_coefficients_lie_between_the_floor_and_twice_the_floor(shape: ModelShape, hardware: Hardware) -> None:
    one = Roofline(shape, hardware, efficiency=Efficiency(overhead_s=1e-4))
    for step in (decodes(1), decodes(64), decodes(1000, 100), prompt(16), prompt(300), prompt(8000)):
        floor = one.seconds(step)
        assert floor * (1 - 1e-9) <= one.cost().predict(step) <= 2 * floor


def test_two_accelerators_halve_all_but_their_communication() -> None:
    two = Roofline(LLAMA_8B, H200, degree=2)
    assert two.cost().base_s == pytest.approx(FLOOR.cost().base_s / 2)
    assert two.cost().decode_context_s == pytest.approx(FLOOR.cost().decode_context_s / 2)
    # 64 sums of 4,096 bf16 numbers, each accelerator sends as many as there are: 524,288 bytes at 360 GB/s.
    difference_s = two.seconds(prompt(2048)) - FLOOR.seconds(prompt(2048)) / 2
    assert difference_s == pytest.approx(2048 * 64 * 4096 * 2 / 360e9, rel=1e-6)


def test_what_is_slower_makes_the_step_slower() -> None:
    half = replace(H200, memory_bandwidth=H200.memory_bandwidth / 2)
    assert Roofline(LLAMA_8B, half).seconds(decodes(8)) == pytest.approx(2 * FLOOR.seconds(decodes(8)))
    assert Roofline(LLAMA_8B, half).seconds(prompt(4096)) == pytest.approx(FLOOR.seconds(prompt(4096)))
    assert Roofline(LLAMA_8B, A100).seconds(prompt(4096)) > 3 * FLOOR.seconds(prompt(4096))


def test_what_fits_and_what_does_not() -> None:
    # 0.9 x 141 GB without 16.06 GB of weights, in blocks of 2 MiB.
    assert FLOOR.num_blocks(16) == int((0.9 * 141e9 - LLAMA_8B.weight_bytes()) // (16 * 131_072))
    with pytest.raises(ValueError, match="does not fit"):
        Roofline(LLAMA_70B, L40S, degree=2).num_blocks(16)
    assert Roofline(LLAMA_70B, H200, degree=2).num_blocks(16) > 10_000
    with pytest.raises(ValueError, match="cannot be cut into 3"):
        Roofline(LLAMA_8B, H200, degree=3)
    with pytest.raises(ValueError, match="shares must lie"):
        Efficiency(compute=1.2)
