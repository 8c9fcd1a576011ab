"""Test which kernels a model gets: compiled ones where possible, an error where they are required and impossible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tandem.core.config import ModelConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime.model_loader import AnyExecutor
from tandem.runtime.models.compiled import CompiledModel
from tandem.runtime.models.decoder import Decoder
from tests.unit.runtime.conftest import CONFIG, load, logits_of, tensors


def _load(directory: Path, kernels: str, dtype: Any = "float32") -> AnyExecutor:
    return load(directory, ModelConfig(dtype=dtype), kernels=kernels)


def test_auto_takes_what_there_is(model_dir: Path) -> None:
    assert isinstance(_load(model_dir, "auto").model, CompiledModel)
    assert isinstance(_load(model_dir, "auto", "float64").model, Decoder)
    assert isinstance(_load(model_dir, "reference").model, Decoder)


def test_compiled_and_reference_kernels_give_equal_logits(model_dir: Path) -> None:
    compiled, plain = logits_of(_load(model_dir, "compiled")), logits_of(_load(model_dir, "reference"))
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


def test_packed_weights_are_made_once(model_dir: Path) -> None:
    first = logits_of(_load(model_dir, "compiled"))
    (packed,) = (model_dir / "cache" / "packed").glob("[!.]*")
    stamp = packed.stat().st_mtime_ns
    assert torch.equal(logits_of(_load(model_dir, "compiled")), first)
    assert packed.stat().st_mtime_ns == stamp


def test_other_weights_are_packed_anew(model_dir: Path) -> None:
    first = logits_of(_load(model_dir, "compiled"))
    save_file({name: tensor * 1.5 for name, tensor in tensors().items()}, model_dir / "model.safetensors")
    assert not torch.equal(logits_of(_load(model_dir, "compiled")), first)


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
