"""Values left to the device come to the same numbers everywhere, and values that were said stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.config import Bytes, Config, EngineConfig, ModelConfig, SpeculativeConfig
from tandem.core.config_rules import violations
from tandem.core.device_defaults import with_device_defaults

_CPU, _CUDA = Config(), Config(model=ModelConfig(device="cuda"))


def test_on_a_cpu() -> None:
    settled = with_device_defaults(_CPU)
    engine = settled.engine
    assert (settled.model.dtype, engine.block_size, engine.kv_cache_memory) == ("float32", 16, 1 << 30)
    assert (engine.plan_depth, engine.num_threads) == (1, 0)


def test_on_a_gpu() -> None:
    settled = with_device_defaults(_CUDA)
    engine = settled.engine
    assert (settled.model.dtype, engine.block_size, engine.kv_cache_memory) == ("bfloat16", 64, 0)
    assert (engine.plan_depth, engine.num_threads) == (2, 1)


def test_guesses_need_the_last_token_so_steps_do_not_overlap() -> None:
    assert with_device_defaults(replace(_CUDA, speculative=SpeculativeConfig(method="ngram"))).engine.plan_depth == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_was_said_holds_and_a_second_time_changes_nothing(device: str) -> None:
    engine = EngineConfig(block_size=32, kv_cache_memory=Bytes(5 << 20), plan_depth=2, num_threads=3)
    said = Config(model=ModelConfig(device=device, dtype="float64"), engine=engine)  # type: ignore[arg-type]
    assert with_device_defaults(said) == said
    left = Config(model=ModelConfig(device=device))  # type: ignore[arg-type]
    assert with_device_defaults(with_device_defaults(left)) == with_device_defaults(left)
    assert violations(with_device_defaults(left)) == ()
