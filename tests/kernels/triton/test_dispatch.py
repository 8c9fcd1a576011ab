"""Which kernels a device gets: never others than its own."""

from __future__ import annotations

import sys

import pytest
import torch
import triton.language as tl

from tandem_kernels.dispatch import REFERENCE, KernelsUnavailable, kernels_for
from tandem_kernels.triton import BATCH_INVARIANT, KERNELS, interpret


def test_each_device_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpret, "INTERPRETED", tl.constexpr(False))
    assert kernels_for(torch.device("cpu")) is REFERENCE
    assert kernels_for(torch.device("cuda", 1)) is KERNELS
    assert kernels_for(torch.device("cuda", 1), batch_invariant=True) is BATCH_INVARIANT
    with pytest.raises(KernelsUnavailable, match="plain torch has no batch-invariant products"):
        kernels_for(torch.device("cpu"), batch_invariant=True)
    with pytest.raises(KernelsUnavailable, match="meta"):
        kernels_for(torch.device("meta"))


def test_a_gpu_s_kernels_are_not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpret, "INTERPRETED", tl.constexpr(True))
    with pytest.raises(KernelsUnavailable, match="TRITON_INTERPRET"):
        kernels_for(torch.device("cuda"))


def test_a_gpu_without_triton_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(KernelsUnavailable, match="Triton is not installed"):
        kernels_for(torch.device("cuda"))
