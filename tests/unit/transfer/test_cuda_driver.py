"""Test queries of the CUDA driver, and refusals where reads of GPU memory would be slow or fail later."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch

from tandem.core.errors import ErrorKind, TandemError
from tandem.transfer import nixl_agent
from tandem.transfer.cuda_driver import CudaDriver
from tandem.transfer.nixl_agent import open_agent
from tandem.transfer.nixl_transport import NixlTransport
from tests.memory_pools import memory_pool
from tests.unit.transfer.scripted import LAYOUT

POOL = memory_pool(4096, 1, LAYOUT, "cuda:0")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


class Library:
    """A driver double that records calls; the call named `failing` fails."""

    def __init__(self, failing: str = "", *, is_shareable: bool = True) -> None:
        self.calls: list[str] = []
        self._failing = failing
        self._is_shareable = is_shareable
        self._contexts: dict[int, int] = {}
        self.current = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self._failing:
                return 101
            if hasattr(type(self), f"do_{name}"):
                getattr(self, f"do_{name}")(*arguments)
            return 0

        return call

    def do_cuDeviceGet(self, device: Any, number: ctypes.c_int) -> None:
        device._obj.value = 40 + number.value

    def do_cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> None:
        context._obj.value = 1000 + device.value

    def do_cuCtxSetCurrent(self, context: ctypes.c_void_p) -> None:
        self.current = context.value or 0

    def do_cuPointerGetAttribute(self, value: Any, attribute: ctypes.c_int, address: ctypes.c_uint64) -> None:
        assert (attribute.value, address.value) == (10, 1 << 40)
        value._obj.value = int(self._is_shareable)


def test_a_thread_gets_the_primary_context_of_its_device() -> None:
    library = Library()
    CudaDriver(library).enter(3)
    assert library.calls[0] == "cuInit"
    assert library.current == 1043


@pytest.mark.parametrize("is_shareable", [True, False])
def test_memory_is_queried_for_whether_it_can_be_shared(is_shareable: bool) -> None:
    assert CudaDriver(Library(is_shareable=is_shareable)).can_share(1 << 40) is is_shareable


@pytest.mark.parametrize("name", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"])
def test_what_the_driver_refuses_is_named(name: str) -> None:
    with pytest.raises(TandemError, match=rf"refuses {name} \(CUresult 101\)") as error:
        CudaDriver(Library(name)).enter(0)
    assert error.value.kind is ErrorKind.UNSUPPORTED


@without_gpu
def test_gpu_memory_where_there_is_no_gpu_is_refused() -> None:
    with pytest.raises(TandemError, match="CUDA driver") as error:
        NixlTransport(POOL, "x.1.0")
    assert error.value.kind is ErrorKind.UNSUPPORTED


@pytest.mark.parametrize(
    ("transports", "is_refused"),
    [
        (None, False),
        ("all", False),
        ("rc,cuda_copy,cuda_ipc,tcp", False),
        ("sm,cuda", False),
        ("^ib", False),
        ("tcp", True),
        ("rc,cuda_ipc", True),
        ("^cuda", True),
        ("^ib,cuda_copy", True),
    ],
)
def test_ucx_transports_without_gpu_memory_are_refused(monkeypatch, transports: str | None, is_refused: bool) -> None:
    own = {"HOME": "/"} | ({} if transports is None else {"UCX_TLS": transports})
    monkeypatch.setattr(os, "environ", own)
    monkeypatch.setattr(nixl_agent, "PACKAGES", ())
    with pytest.raises(TandemError, match="leaves out cuda_copy" if is_refused else "not installed"):
        open_agent("x.1.0", uses_cuda=True)
    assert own["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on"
    own.pop("UCX_CUDA_IPC_ENABLE_GET_ZCOPY")
    with pytest.raises(TandemError, match="not installed"):
        open_agent("x.1.0")
    assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY" not in own
