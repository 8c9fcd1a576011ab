"""The roofline gives the figures that were computed for it independently.

Llama-3.1-8B in bf16 on one H200 at 4.3 TB/s and 788 TFLOP/s, each product by the larger of reading and multiplying.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.step_cost import StepFeatures
from tandem.sim.cost.hardware import A100, H200, HARDWARE, L40S, Hardware
from tandem.sim.cost.model_shapes import LLAMA_8B, LLAMA_70B, SHAPES, ModelShape
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
    assert FLOOR.timer()(step) * 1e3 == pytest.approx(milliseconds, rel=2e-3)


def test_weights_turn_from_memory_to_compute_bound_at_183_sequences() -> None:
    cost = FLOOR.cost()
    assert cost.base_s / cost.decode_seq_s == pytest.approx(183, rel=5e-3)


def test_weights_and_kv_have_the_known_sizes() -> None:
    assert LLAMA_8B.common_weights + LLAMA_8B.expert_weights == pytest.approx(6.979e9, rel=1e-3)
    assert LLAMA_8B.head_weights == pytest.approx(0.525e9, rel=1e-3)
    assert LLAMA_8B.layout(1).token_bytes == 131_072
    totals = {
        "llama-3.1-8b": 8.03e9, "llama-3.1-70b": 70.6e9, "qwen3-8b": 8.19e9, "qwen3-32b": 32.8e9,
        "smollm2-135m": 134.5e6, "mixtral-8x7b": 46.7e9, "qwen3-30b-a3b": 30.5e9, "qwen3-235b-a22b": 235.1e9,
        "glm-4.5-air": 106.9e9,
    }  # fmt: skip
    for name, num_weights in totals.items():
        assert SHAPES[name].weight_bytes() / 2 == pytest.approx(num_weights, rel=5e-3), name


@pytest.mark.parametrize(
    ("name", "active"), [("mixtral-8x7b", 12.9e9), ("qwen3-30b-a3b", 3.35e9), ("qwen3-235b-a22b", 22.1e9)]
)
def test_a_token_passes_through_the_known_number_of_weights(name: str, active: float) -> None:
    shape = SHAPES[name]
    assert shape.active_weights + 2 * shape.head_weights == pytest.approx(active, rel=1e-2)


def test_a_step_reads_the_experts_that_its_tokens_touch() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    one = Roofline(shape, H200)
    read_s = 2 / (H200.memory_bandwidth * one.efficiency.memory)
    alone = (shape.common_weights + shape.expert_weights / 16 + shape.head_weights) * read_s
    assert one.timer()(StepFeatures(num_decode_seqs=1)) == pytest.approx(alone)
    # Of 128 experts, eight for each of 32 tokens: 1 - (120 / 128) ** 32 of them.
    touched = 0.8732 * shape.expert_weights
    many = (shape.common_weights + touched + shape.head_weights) * read_s
    assert one.timer()(StepFeatures(num_decode_seqs=32)) == pytest.approx(many, rel=1e-3)


def test_the_error_names_how_many_accelerators_a_model_needs() -> None:
    mixtral, large = SHAPES["mixtral-8x7b"], SHAPES["qwen3-235b-a22b"]
    with pytest.raises(ValueError, match=r"mixtral-8x7b in bf16 does not fit into 1 x h100: it needs 2"):
        Roofline(mixtral, HARDWARE["h100"]).num_blocks(16)
    assert Roofline(mixtral, HARDWARE["h100"], weights="fp8").num_blocks(16) > 0
    with pytest.raises(ValueError, match=r"its 4 KV heads allow no more than 4$"):
        Roofline(large, HARDWARE["h100"], degree=4).num_blocks(16)


_DENSE = [shape for shape in SHAPES.values() if not shape.expert_layers]


@pytest.mark.parametrize("shape", _DENSE, ids=lambda s: s.name)
@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=lambda h: h.name)
def test_the_coefficients_lie_between_the_floor_and_twice_the_floor(shape: ModelShape, hardware: Hardware) -> None:
    one = Roofline(shape, hardware, efficiency=Efficiency(overhead_s=1e-4))
    for step in (decodes(1), decodes(64), decodes(1000, 100), prompt(16), prompt(300), prompt(8000)):
        floor = one.timer()(step)
        assert floor * (1 - 1e-9) <= one.cost().predict(step) <= 2 * floor


def test_two_accelerators_halve_all_but_their_communication() -> None:
    two = Roofline(LLAMA_8B, H200, degree=2)
    assert two.cost().base_s == pytest.approx(FLOOR.cost().base_s / 2)
    assert two.cost().decode_context_s == pytest.approx(FLOOR.cost().decode_context_s / 2)
    # 64 sums of 4,096 bf16 numbers, each accelerator sends as many as there are: 524,288 bytes at 360 GB/s.
    difference_s = two.timer()(prompt(2048)) - FLOOR.timer()(prompt(2048)) / 2
    assert difference_s == pytest.approx(2048 * 64 * 4096 * 2 / 360e9, rel=1e-6)


def test_what_is_slower_makes_the_step_slower() -> None:
    half = replace(H200, memory_bandwidth=H200.memory_bandwidth / 2)
    assert Roofline(LLAMA_8B, half).timer()(decodes(8)) == pytest.approx(2 * FLOOR.timer()(decodes(8)))
    assert Roofline(LLAMA_8B, half).timer()(prompt(4096)) == pytest.approx(FLOOR.timer()(prompt(4096)))
    assert Roofline(LLAMA_8B, A100).timer()(prompt(4096)) > 3 * FLOOR.timer()(prompt(4096))


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
