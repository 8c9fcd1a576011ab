"""Test the model settings that a device requires, and refusals before any weight is read; no GPU is needed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.bundle import TokenizerBundle
from tandem.core.config import Bytes, EngineConfig, ModelConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockId, SeqId
from tandem.core.request import SamplingParams
from tandem.runtime import cuda_stream, model_loader
from tandem.runtime.async_executor import AsyncExecutor
from tandem.runtime.cuda_graphs import GraphedModel
from tandem.runtime.cuda_stream import device_kernels
from tandem.runtime.executor import TorchExecutor
from tandem.runtime.fingerprint import model_fingerprint
from tandem.runtime.kv_sizing import CONTEXT_BYTES, step_bytes
from tandem.runtime.model_config import read_model_config
from tandem.sched.state.step_plan import Sampling, ScheduledSlice, StepPlan
from tandem_kernels.dispatch import REFERENCE, Kernels
from tests.stand_in import stand_in_for_a_gpu
from tests.unit.runtime.conftest import load

_BUNDLE = TokenizerBundle(b"{}", "", "{}", "{}")


def test_without_a_gpu_cuda_is_refused_with_a_reason(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TandemError, match="no GPU") as refused:
        load(model_dir, ModelConfig(device="cuda"))
    assert (refused.value.kind, refused.value.param) == (ErrorKind.UNSUPPORTED, "device")


def test_without_triton_a_gpu_s_kernels_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(TandemError, match="Triton is not installed") as refused:
        device_kernels(torch.device("cuda", 0))
    assert (refused.value.kind, refused.value.param) == (ErrorKind.UNSUPPORTED, "device")


def test_memory_that_is_too_small_is_a_clear_error(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's allocator fails in the middle of the weights."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")

    stand_in_for_a_gpu(monkeypatch, 80 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    monkeypatch.setattr(model_loader, "_load_gpu_rank", fail)
    with pytest.raises(TandemError, match=r"1024 of 81920 MiB are free.*20\.00 GiB") as refused:
        load(model_dir, ModelConfig(device="cuda"))
    assert refused.value.param == "kv_cache_memory"


def test_a_share_that_holds_no_kv_is_a_clear_error(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 900 << 20)
    with pytest.raises(TandemError, match="leaves nothing for KV: 900 MiB hold weights") as refused:
        model_loader._pool_bytes(
            torch.device("cpu"), read_model_config(model_dir), EngineConfig(gpu_memory_utilization=0.5), torch.bfloat16
        )
    assert refused.value.param == "gpu_memory_utilization"


def test_float32_products_on_a_gpu_are_float32_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert cuda_stream.open_cuda() == torch.device("cuda", 0)
        assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)


def test_what_is_left_to_the_device_is_the_cpu_s(model_dir: Path) -> None:
    executor = load(model_dir, ModelConfig(), max_model_len=64)
    assert (executor.layout.block_size, executor.layout.group.dtype) == (16, "float32")
    assert isinstance(executor, TorchExecutor)


def test_two_plans_on_a_cpu_are_a_device_s_where_kernels_are_the_reference(model_dir: Path) -> None:
    kinds = [
        type(load(model_dir, ModelConfig(), kernels=kernels, plan_depth=depth))
        for kernels, depth in (("reference", 1), ("reference", 2), ("auto", 2))
    ]
    assert kinds == [TorchExecutor, AsyncExecutor, TorchExecutor]


def test_float8_kv_takes_less_and_compiled_kernels_refuse_it(model_dir: Path) -> None:
    wide = load(model_dir, ModelConfig(), kernels="reference")
    narrow = load(model_dir, ModelConfig(), kv_cache_dtype="float8_e4m3fn")
    # 8 components a head: 8 bytes and a scale of 4 for 32 bytes.
    assert narrow.layout.block_bytes * 32 == wide.layout.block_bytes * 12
    assert narrow.cache.region.block_bytes == narrow.layout.block_bytes == narrow.cache.pool[0].nbytes
    with pytest.raises(TandemError, match="float8_e4m3fn"):
        load(model_dir, ModelConfig(), kv_cache_dtype="float8_e4m3fn", kernels="compiled")


def test_batch_invariance_on_a_cpu_is_the_compiled_kernels(model_dir: Path) -> None:
    assert isinstance(load(model_dir, ModelConfig(batch_invariant=True)), TorchExecutor)
    for model, engine, reason in (
        (ModelConfig(), {"kernels": "reference"}, "engine.kernels=reference"),
        (ModelConfig(dtype="bfloat16"), {}, "compiled kernels compute in float32"),
    ):
        with pytest.raises(TandemError, match=reason) as refused:
            load(model_dir, replace(model, batch_invariant=True), **engine)
        assert (refused.value.kind, refused.value.param) == (ErrorKind.UNSUPPORTED, "batch_invariant")


def test_a_whole_embedding_table_is_not_copied(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays in the mapped file, which the workers of a machine share; only a rank with fewer tokens pads it."""
    pad = torch.nn.functional.pad
    sizes: list[int] = []

    def record(tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        sizes.append(tensor.dim())
        return pad(tensor, *how)

    monkeypatch.setattr(torch.nn.functional, "pad", record)
    load(model_dir, ModelConfig(), kernels="reference")
    assert set(sizes) <= {1}, "a matrix was padded"


def test_fp8_needs_a_gpu(model_dir: Path) -> None:
    with pytest.raises(TandemError, match="fp8 runs on a GPU only") as refused:
        load(model_dir, ModelConfig(quantization="fp8"))
    assert (refused.value.kind, refused.value.param) == (ErrorKind.UNSUPPORTED, "quantization")


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_batch_invariant_kernels_are_requested_on_a_gpu(
    batch_invariant: bool, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[bool] = []

    def kernels(device: torch.device, *, batch_invariant: bool) -> Kernels:
        requested.append(batch_invariant)
        return REFERENCE

    stand_in_for_a_gpu(monkeypatch, 1 << 30)
    monkeypatch.setattr(model_loader, "device_kernels", kernels)
    load(model_dir, ModelConfig(device="cuda", batch_invariant=batch_invariant))
    assert requested == [batch_invariant]


def test_workers_exchange_no_kv_of_other_numbers(model_dir: Path) -> None:
    """Float8 KV of a bfloat16 model differs from that of a float32 model, so their fingerprints differ."""
    config = read_model_config(model_dir)

    def fingerprint(dtype: Any, kv: Any) -> str:
        model = ModelConfig(dtype=dtype)
        executor = load(model_dir, model, kv_cache_dtype=kv, kernels="reference")
        return model_fingerprint("w", config, model, _BUNDLE, executor.layout).digest

    pairs = [(dtype, kv) for dtype in ("float32", "bfloat16") for kv in ("auto", "float8_e4m3fn")]
    assert len({fingerprint(*pair) for pair in pairs}) == 4


def test_batch_invariant_workers_exchange_kv_where_they_compute_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other workers exchange KV whichever kernels they use."""
    monkeypatch.setattr(model_loader, "cuda_arithmetic", lambda: "kernels on a GPU")
    found = [
        model_loader._arithmetic(ModelConfig(batch_invariant=is_so, device=device), EngineConfig(tensor_parallel=ranks))
        for is_so in (False, True)
        for device, ranks in (("cpu", 1), ("cuda", 1), ("cuda", 2))
    ]
    assert found[:3] == ["", "", ""] and len(set(found[3:])) == 3
    assert found[4:] == ["kernels on a GPU, 1 ranks", "kernels on a GPU, 2 ranks"]


def test_what_is_composed_for_a_gpu_computes(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the device itself, for which the CPU stands: weights on it, a pool of what is left, graphs, a step."""
    total = 8 << 30
    stand_in_for_a_gpu(monkeypatch, total)
    engine = {"gpu_memory_utilization": 0.2, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    executor = load(model_dir, ModelConfig(device="cuda"), kv_cache_memory=Bytes(0), **engine)
    assert isinstance(executor, AsyncExecutor) and isinstance(executor.model, GraphedModel)
    assert executor.layout.block_size == 64 and executor.model.dtype is torch.bfloat16
    settings = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64)
    room = int(0.2 * total) - (1 << 20) - CONTEXT_BYTES - step_bytes(executor.model.config, settings, 2)
    assert executor.num_blocks == (room - executor.layout.probe_bytes) // executor.layout.block_bytes > 0
    executor = load(model_dir, ModelConfig(device="cuda"), kv_cache_memory=Bytes(1 << 20), **engine)
    assert executor.num_blocks == (1 << 20) // executor.layout.block_bytes, "a size wins over a share"
    sampling = Sampling(SamplingParams(max_tokens=2, temperature=0), 0, 0)
    chunk = ScheduledSlice(SeqId(1), 0, 3, (4, 5, 6), (BlockId(0),), sampling)
    (first,) = executor.execute(StepPlan(0, (chunk,))).slices
    chained = ScheduledSlice(SeqId(1), 3, 1, (), (BlockId(0),), replace(sampling, index=1), chained=True)
    (second,) = executor.execute(StepPlan(1, (chained,))).slices
    assert first.error is None and second.error is None and len(second.tokens) == 1
