"""Test that the KV pool gets the rest of a worker's share of a GPU, and no more than is free."""

from __future__ import annotations

from tandem.core.config import EngineConfig
from tandem.runtime.kv_sizing import CONTEXT_BYTES, gpu_pool_bytes, step_bytes
from tandem.runtime.model_config import parse_model_config
from tandem_kernels.contract import SCRATCH_BYTES
from tests.unit.runtime.conftest import CONFIG

_GIB = 1 << 30
_H200 = {"total": 140 * _GIB, "free": 120 * _GIB, "used": 16 * _GIB, "step": 2 * _GIB}


def test_a_share_less_weights_activations_and_context() -> None:
    assert gpu_pool_bytes(0.5, **_H200) == 70 * _GIB - 16 * _GIB - 2 * _GIB - CONTEXT_BYTES


def test_never_more_than_is_free() -> None:
    assert gpu_pool_bytes(0.9, **_H200 | {"free": 20 * _GIB}) == 18 * _GIB


def test_two_workers_of_one_gpu_fit_in_any_start_order() -> None:
    """The second worker to start finds less free memory, and gets the same share."""
    share = 0.9 / 2
    first = gpu_pool_bytes(share, **_H200)
    second = gpu_pool_bytes(share, **_H200 | {"free": _H200["free"] - first - 18 * _GIB})
    assert first == second and 2 * (first + 16 * _GIB + 2 * _GIB + CONTEXT_BYTES) <= 0.9 * 140 * _GIB


def test_weights_larger_than_the_share_leave_nothing() -> None:
    assert gpu_pool_bytes(0.1, **_H200) < 0


def test_a_step_needs_more_for_more_rows_and_for_more_logits() -> None:
    config = parse_model_config(CONFIG)
    few = step_bytes(config, EngineConfig(max_num_batched_tokens=64, max_num_seqs=8), 2)
    many = step_bytes(config, EngineConfig(max_num_batched_tokens=128, max_num_seqs=8), 2)
    wide = step_bytes(config, EngineConfig(max_num_batched_tokens=64, max_num_seqs=16), 2)
    row = (4 * CONFIG["hidden_size"] + (2 * 4 + 2 * 2) * 8 + 3 * CONFIG["intermediate_size"]) * 2
    assert few == int(1.5 * (64 * row + 8 * CONFIG["vocab_size"] * 20)) + 2 * SCRATCH_BYTES
    eager = EngineConfig(max_num_batched_tokens=64, max_num_seqs=8, cuda_graphs=False)
    assert few - step_bytes(config, eager, 2) == SCRATCH_BYTES
    assert many - few == int(1.5 * 64 * row)
    assert wide - few == int(1.5 * 8 * CONFIG["vocab_size"] * 20)
