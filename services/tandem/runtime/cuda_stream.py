"""Implement `DeviceStream` for a GPU, and open and query the GPU of this process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tandem.core.errors import ErrorKind, TandemError
from tandem.engine.ports import DeviceLost
from tandem.runtime.device import rank_device
from tandem.runtime.device_stream import DeviceStream, StreamMark
from tandem_kernels.dispatch import Kernels, KernelsUnavailable, kernels_for

WARM_UP_CALLS = 2
"""Calls before a graph is captured. The first calls compile kernels and create library handles, which is forbidden
during a capture."""

LEAST_SHARED_BYTES = 163 << 10
"""Required shared memory per thread block. GPUs of compute capability 8.0 and later have it, except 8.6 and 8.9 with
99 KiB; tiles of bfloat16 with a head_dim of 128 take 129 KiB."""


LEAST_FLOAT8 = 8, 9
"""First compute capability (major, minor) with float8 instructions."""


class _Event(StreamMark):
    """Mark on a GPU's stream. Waiting blocks in the driver without the GIL, so that the event loop's thread can run.

    After a failed kernel every later CUDA call in the process fails, so the constructor raises DeviceLost too.
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


class CudaStream(DeviceStream):
    """`DeviceStream` for a GPU: a CUDA stream, with a memory pool that all graphs captured on it share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def running(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def host_words(self, num: int) -> torch.Tensor:
        return torch.empty(num, dtype=torch.int64, pin_memory=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        # torch's allocator reuses pinned memory only after the copy into it has finished.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def mark(self) -> StreamMark:
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
    """Make the GPU of a rank the current device of this process, and return it.

    `rank`: number of the rank among those on this machine, from which `device.rank_device` chooses the GPU. From then
    on, matrix products in float32 are computed without TF32. Raises TandemError when no GPU is visible or torch was
    built without CUDA."""
    if not torch.cuda.is_available():
        raise _refuse("torch finds no GPU: check nvidia-smi, CUDA_VISIBLE_DEVICES and that torch was built with CUDA")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    device = rank_device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def device_kernels(device: torch.device, *, batch_invariant: bool = False) -> Kernels:
    """Return the kernels that run on a GPU.

    With `batch_invariant` they are those whose results for a row do not depend on the other rows of the batch. Raises
    TandemError when there are no kernels for this GPU or it has too little shared memory for them."""
    try:
        kernels = kernels_for(device, batch_invariant=batch_invariant)
    except KernelsUnavailable as error:
        raise _refuse(str(error)) from None
    shared: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    if shared < LEAST_SHARED_BYTES:
        name, needed = torch.cuda.get_device_name(device), LEAST_SHARED_BYTES >> 10
        raise _refuse(f"{name} has {shared >> 10} KiB of shared memory per block, and the kernels need {needed} KiB")
    return kernels


def require_float8(device: torch.device, setting: str, other: str) -> None:
    """Raise TandemError unless this GPU computes with float8, which it does from compute capability 8.9 on.

    `setting`: name of the setting whose value needs float8. `other`: value that works without float8; the error message
    advises it."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < LEAST_FLOAT8:
        name = torch.cuda.get_device_name(device)
        message = f"{setting} needs compute capability 8.9 or later, {name} has {major}.{minor}: set it to {other}"
        raise TandemError(ErrorKind.UNSUPPORTED, message, param=setting.partition(".")[2])


def arithmetic() -> str:
    """Return a text that names the GPU model and the versions of torch and Triton, for a model's fingerprint.

    The bits of batch-invariant results depend on these, so two workers exchange KV only if their texts are equal."""
    triton: Any = importlib.import_module("triton")
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"


def _refuse(message: str) -> TandemError:
    return TandemError(ErrorKind.UNSUPPORTED, f"model.device=cuda: {message}", param="device")
