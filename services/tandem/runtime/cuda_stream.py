"""Streams, events, graphs and pinned memory of one GPU, and what the process asks of it; never knows of a step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tandem.core.errors import ErrorKind, TandemError
from tandem.engine.ports import DeviceLost
from tandem.runtime.device import rank_device
from tandem.runtime.device_stream import StreamEvent
from tandem_kernels.dispatch import Kernels, KernelsUnavailable, kernels_for

WARM_UP_CALLS = 2
"""Before a graph is captured: kernels are compiled and libraries make their handles in the first ones, which a capture
forbids."""

LEAST_SHARED_BYTES = 163 << 10
"""What a program can have from compute capability 8.0 on, 8.6 and 8.9 left out, which have 99 KiB: tiles of bfloat16
with heads of 128 take 129 KiB."""


LEAST_FLOAT8 = 8, 9
"""The first compute capability with instructions for the type."""


class _Event:
    """A `StreamEvent`. Waiting sleeps in the driver, so that the event loop's thread has the interpreter meanwhile.

    A kernel that failed leaves a context in which every later call fails as well: to make one raises DeviceLost too.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        try:
            self._event.record(stream)
        except RuntimeError as error:
            raise DeviceLost(str(error)) from error

    def wait(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise DeviceLost(str(error)) from error


class CudaStream:
    """A `Stream`. Each has memory of its own for the graphs that it captures."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def running(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def host_words(self, num: int) -> torch.Tensor:
        return torch.empty(num, dtype=torch.int64, pin_memory=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        # The allocator hands pinned memory out again only after the copy into it.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def mark(self) -> StreamEvent:
        return _Event(self._stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_CALLS):
                work()
        self._stream.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def __repr__(self) -> str:
        return f"CudaStream({self.device})"


def open_cuda(rank: int = 0) -> torch.device:
    """The GPU that this process computes on, see `device.rank_device`; float32 products there are float32's. Raises
    TandemError."""
    if not torch.cuda.is_available():
        raise _refuse("no CUDA device is visible to this process, or torch was built without CUDA")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    device = rank_device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def device_kernels(device: torch.device, *, batch_invariant: bool = False) -> Kernels:
    """Raises TandemError where it has none that fit."""
    try:
        kernels = kernels_for(device, batch_invariant=batch_invariant)
    except KernelsUnavailable as error:
        raise _refuse(str(error)) from None
    shared: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    if shared < LEAST_SHARED_BYTES:
        name, needed = torch.cuda.get_device_name(device), LEAST_SHARED_BYTES >> 10
        raise _refuse(f"a program on {name} has {shared >> 10} KiB of shared memory, the kernels' tiles take {needed}")
    return kernels


def require_float8(device: torch.device) -> None:
    """Raises TandemError where the kernels cannot read float8 KV."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < LEAST_FLOAT8:
        name = torch.cuda.get_device_name(device)
        message = f"float8 KV takes instructions of compute capability 8.9, {name} has {major}.{minor}"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param="kv_cache_dtype")


def arithmetic() -> str:
    """What the bits of batch-invariant kernels depend on: this process's GPU, and who compiles and computes for it."""
    triton: Any = importlib.import_module("triton")
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Bytes of a GPU that nobody uses, and of all of it."""
    free, total = torch.cuda.mem_get_info(device)
    return free, total


def reserved(device: torch.device) -> int:
    """Bytes that this process's tensors take, with what its allocator keeps for more."""
    return torch.cuda.memory_reserved(device)


def _refuse(message: str) -> TandemError:
    return TandemError(ErrorKind.UNSUPPORTED, f"device 'cuda': {message}", param="device")
