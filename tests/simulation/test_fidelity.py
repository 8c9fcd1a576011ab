"""The stated errors of rooflines are those that simulating again gives."""

from __future__ import annotations

import pytest

from tandem.core.config import Config, EngineConfig, GatewayConfig
from tandem.core.slo import Slo
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.cost.hardware import H200
from tandem.sim.cost.model_shapes import LLAMA_8B, SHAPES
from tandem.sim.cost.roofline import COMPARED, SERVING, Compared, Efficiency, Roofline, fidelity
from tandem.sim.simulate import simulate
from tandem.workload.mix import RequestClass, poisson


@pytest.mark.nightly
@pytest.mark.parametrize(
    "one",
    [one for one in COMPARED if one.output == 128 and one.prompt == 2048],
    ids=lambda one: f"{one.shape.name} on {one.degree} x {one.hardware.name}",
)
def test_what_is_stated_as_simulated_is(one: Compared) -> None:
    gateway = GatewayConfig(max_queued=10**6, queue_timeout_s=1e9, progress_timeout_s=1e9, disaggregation="off")
    engine = EngineConfig(max_num_batched_tokens=8192, max_num_seqs=2048, enable_prefix_caching=False)
    roofline = Roofline(one.shape, one.hardware, one.degree, SERVING, "fp8", "fp8")
    spec = WorkerSpec.of("mixed", roofline, Config(engine=engine, gateway=gateway))
    group = RequestClass("g", 1.0, (one.prompt, one.prompt), (one.output, one.output))
    # Enough to fill the KV twice.
    number = min(1000, int(2.2 * spec.num_blocks * 16 / (one.prompt + one.output)))
    report, _ = simulate(ClusterSpec(workers=((spec, 1),), gateway=gateway), poisson([group], 0, number, 0.0), Slo())
    assert report.errors == {}
    assert report.output_rate == pytest.approx(one.simulated, rel=0.01)


def test_nothing_is_claimed_beyond_what_was_compared() -> None:
    compared = fidelity(Roofline(LLAMA_8B, H200, 1, SERVING, "fp8", "fp8"))
    assert compared.startswith("-11% to +17%") and "12 figures" in compared
    assert fidelity(Roofline(LLAMA_8B, H200, 1, SERVING)).startswith("unknown for this model")
    assert fidelity(Roofline(SHAPES["qwen3-8b"], H200, 1, SERVING, "fp8", "fp8")).startswith("unknown for this model")
    assert fidelity(Roofline(LLAMA_8B, H200, 1, Efficiency())).startswith("unknown: nothing was compared")
