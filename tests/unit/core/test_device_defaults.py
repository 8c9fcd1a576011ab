"""Test that settings left to the device get the same values everywhere, and that explicit values stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.config import Bytes, Config, EngineConfig, ModelConfig, SpeculativeConfig
from tandem.core.config_rules import violations
from tandem.core.device_defaults import with_device_defaults

_CPU, _CUDA = Config(), Config(model=ModelConfig(device="cuda"))


def test_on_a_cpu() -> None:
    resolved = with_device_defaults(_CPU)
    engine = resolved.engine
    assert (resolved.model.dtype, engine.block_size, engine.kv_cache_memory) == ("float32", 16, 1 << 30)
    assert (engine.plan_depth, engine.num_threads) == (1, 0)


def test_on_a_gpu() -> None:
    resolved = with_device_defaults(_CUDA)
    engine = resolved.engine
    assert (resolved.model.dtype, engine.block_size, engine.kv_cache_memory) == ("bfloat16", 64, 0)
    assert (engine.plan_depth, engine.num_threads) == (2, 1)


def test_drafts_need_the_last_token_so_steps_do_not_overlap() -> None:
    assert with_device_defaults(replace(_CUDA, speculative=SpeculativeConfig(method="ngram"))).engine.plan_depth == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_explicit_values_stay_and_a_second_call_changes_nothing(device: str) -> None:
    engine = EngineConfig(block_size=32, kv_cache_memory=Bytes(5 << 20), plan_depth=2, num_threads=3)
    explicit = Config(model=ModelConfig(device=device, dtype="float64"), engine=engine)  # type: ignore[arg-type]
    assert with_device_defaults(explicit) == explicit
    defaults = Config(model=ModelConfig(device=device))  # type: ignore[arg-type]
    assert with_device_defaults(with_device_defaults(defaults)) == with_device_defaults(defaults)
    assert violations(with_device_defaults(defaults)) == []
