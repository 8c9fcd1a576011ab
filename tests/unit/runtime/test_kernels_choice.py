"""Test which kernels a model gets: compiled ones where possible, an error where they are required and impossible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file

from tandem.core.config import Bytes, EngineConfig, ModelConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import BlockId, SeqId
from tandem.runtime.executor import TorchExecutor
from tandem.runtime.model_config import read_model_config
from tandem.runtime.model_loader import load_executor
from tandem.runtime.models.compiled import CompiledModel
from tandem.runtime.models.decoder import Decoder
from tandem.sched.state.step_plan import ScheduledSlice
from tests.executor_logits import executor_logits
from tests.unit.runtime.conftest import CONFIG, tensors


def _load(directory: Path, kernels: Literal["auto", "compiled", "reference"], dtype: Any = "float32") -> TorchExecutor:
    engine = EngineConfig(kernels=kernels, num_threads=1, kv_cache_memory=Bytes(1 << 20))
    model = ModelConfig(dtype=dtype, cache_dir=str(directory / "cache"))
    return load_executor(directory, read_model_config(directory), model, engine)


def _logits(executor: TorchExecutor) -> torch.Tensor:
    return executor_logits(executor, ScheduledSlice(SeqId(1), 0, 3, (4, 5, 6), (BlockId(0),), None))


def test_auto_takes_what_there_is(model_dir: Path) -> None:
    assert isinstance(_load(model_dir, "auto").model, CompiledModel)
    assert isinstance(_load(model_dir, "auto", "float64").model, Decoder)
    assert isinstance(_load(model_dir, "reference").model, Decoder)


def test_compiled_and_reference_kernels_give_equal_logits(model_dir: Path) -> None:
    compiled, plain = _logits(_load(model_dir, "compiled")), _logits(_load(model_dir, "reference"))
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


def test_packed_weights_are_made_once(model_dir: Path) -> None:
    first = _logits(_load(model_dir, "compiled"))
    (packed,) = (model_dir / "cache" / "packed").glob("[!.]*")
    stamp = packed.stat().st_mtime_ns
    assert torch.equal(_logits(_load(model_dir, "compiled")), first)
    assert packed.stat().st_mtime_ns == stamp


def test_other_weights_are_packed_anew(model_dir: Path) -> None:
    first = _logits(_load(model_dir, "compiled"))
    save_file({name: tensor * 1.5 for name, tensor in tensors().items()}, model_dir / "model.safetensors")
    assert not torch.equal(_logits(_load(model_dir, "compiled")), first)


def test_compiled_kernels_are_refused_for_an_unsupported_dtype_or_size(model_dir: Path) -> None:
    with pytest.raises(TandemError, match="float32") as error:
        _load(model_dir, "compiled", "bfloat16")
    assert error.value.kind is ErrorKind.UNSUPPORTED
    (model_dir / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 40}))
    with pytest.raises(TandemError, match="inner=40 is no multiple"):
        _load(model_dir, "compiled")


def test_without_a_compiler(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem_kernels.native import library
    from tandem_kernels.native.build import NativeUnavailable

    def fail() -> None:
        raise NativeUnavailable("no C++ compiler")

    monkeypatch.setattr(library, "load", fail)
    assert isinstance(_load(model_dir, "auto").model, Decoder)
    with pytest.raises(TandemError, match="no C"):
        _load(model_dir, "compiled")
