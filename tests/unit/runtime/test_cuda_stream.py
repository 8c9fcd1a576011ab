"""Test the calls to a GPU's driver and the handling of its answers, with a double of the driver."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.core.errors import ErrorKind, TandemError
from tandem.engine.ports import DeviceLost
from tandem.kv.layout import KVGroup, KVLayout
from tandem.runtime import cuda_stream, kv_cache

LAYOUT = KVLayout(16, (KVGroup(3, 4, 8, "float32"),))


def test_a_gpu_on_which_tiles_do_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is at start, not at the first prompt."""
    shared = 99 << 10
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(shared_memory_per_block_optin=shared)
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a small GPU")
    kernels = object()
    monkeypatch.setattr(cuda_stream, "kernels_for", lambda _, **__: kernels)
    with pytest.raises(TandemError, match="a small GPU has 99 KiB of shared memory") as refused:
        cuda_stream.device_kernels(torch.device("cuda"))
    assert refused.value.kind is ErrorKind.UNSUPPORTED
    shared = 227 << 10
    assert cuda_stream.device_kernels(torch.device("cuda")) is kernels


def test_float8_takes_a_gpu_that_has_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an older GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    needed = torch.device("cuda"), "engine.kv_cache_dtype", "auto"
    with pytest.raises(TandemError, match=r"kv_cache_dtype needs .*an older GPU has 8\.0: set it to auto") as refused:
        cuda_stream.require_float8(*needed)
    assert (refused.value.kind, refused.value.param) == (ErrorKind.UNSUPPORTED, "kv_cache_dtype")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    cuda_stream.require_float8(*needed)


def test_bits_depend_on_the_gpu_and_on_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.9"))
    found = set()
    for name, version in (("a GPU", "2.13"), ("another", "2.13"), ("a GPU", "2.14")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        monkeypatch.setattr(torch, "__version__", version)
        found.add(cuda_stream.arithmetic())
    assert len(found) == 3 and "a GPU, torch 2.13, Triton 3.9" in found


class Runtime:
    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.registered.append((address, num_bytes))
        return self.code


def test_host_memory_has_the_requested_size_and_is_locked_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = kv_cache._pinned(LAYOUT, 5)
    assert memory.shape == (5, *LAYOUT.block_shape()) and not memory.any()
    assert runtime.registered == [(memory.data_ptr(), 5 * LAYOUT.block_bytes)]
    assert kv_cache._pinned(LAYOUT, 0).shape == (0, *LAYOUT.block_shape()) and len(runtime.registered) == 1


def test_host_memory_that_cannot_be_locked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    with pytest.raises(TandemError, match="CUDA error 2"):
        kv_cache._pinned(LAYOUT, 5)


@pytest.mark.parametrize("broken", ["record", "synchronize"])
def test_an_event_of_a_lost_device_raises_that_error(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Any) -> None:
            self._act("record")

        def synchronize(self) -> None:
            self._act("synchronize")

        def _act(self, name: str) -> None:
            if name == broken:
                raise RuntimeError("an illegal address")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    with pytest.raises(DeviceLost, match="an illegal address"):
        cuda_stream._Event(SimpleNamespace()).wait()  # type: ignore[arg-type]
