"""Give a transport thread its CUDA context, check whether GPU memory can be shared with other processes, and copy
between GPU and pinned memory.

The driver is called by ctypes, so that a transport needs no torch. Two facts make `enter` and `can_share` necessary:

- A thread starts without a CUDA context. When UCX looks at a peer's memory in such a thread, it silently treats
  cuda_ipc as unreachable (openucx/ucx pull request 11240).
- Memory from the driver's virtual memory management API, such as torch's expandable segments, has no handle that
  cuda_ipc can pass on, so reads of it go over TCP at a hundredth of the rate (ai-dynamo/nixl issue 1754).
"""

from __future__ import annotations

import ctypes
from typing import Any

from tandem.core.errors import ErrorKind, TandemError

_LIBRARY = "libcuda.so.1"
_IS_LEGACY_CUDA_IPC_CAPABLE = 10
"""CUpointer_attribute that says whether cuIpcGetMemHandle accepts the memory."""
_NON_BLOCKING, _PORTABLE = 1, 1
"""Flag of cuStreamCreate: the stream does not wait for the default stream. Flag of cuMemHostAlloc: the memory is pinned
for all contexts."""


class CudaDriver:
    """Call the CUDA driver of this machine, from any thread.

    All methods and the constructor raise TandemError(UNSUPPORTED) where there is no driver or the driver returns an
    error. `library` replaces the driver in tests.
    """

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = library or ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise TandemError(ErrorKind.UNSUPPORTED, f"there is no CUDA driver here: {error}", param="device") from None
        self._call("cuInit", ctypes.c_uint(0))

    def enter(self, number: int) -> None:
        """Make the primary CUDA context of device `number`, which torch uses too, current for the calling thread. The
        context is retained until the process ends."""
        device = ctypes.c_int()
        context = ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def can_share(self, address: int) -> bool:
        """Return whether other processes of this machine can map the memory at `address`."""
        is_capable = ctypes.c_int(0)
        attribute = ctypes.c_int(_IS_LEGACY_CUDA_IPC_CAPABLE)
        self._call("cuPointerGetAttribute", ctypes.byref(is_capable), attribute, ctypes.c_uint64(address))
        return is_capable.value != 0

    def open_stream(self) -> int:
        """Open a new CUDA stream of the current context and return its handle. Copies on it do not wait for work of
        other streams."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        return stream.value or 0

    def close_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def wait(self, stream: int) -> None:
        """Wait until all copies on the CUDA stream `stream` have ended."""
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def allocate_pinned(self, num_bytes: int) -> int:
        """Allocate `num_bytes` bytes of pinned host memory, which the GPU copies from and to directly, and return the
        address."""
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(_PORTABLE))
        return address.value or 0

    def free_pinned(self, address: int) -> None:
        self._call("cuMemFreeHost", ctypes.c_void_p(address))

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Begin to copy `num_bytes` bytes from GPU memory at the address `source` to pinned memory at `target`, as work
        of the CUDA stream `stream`; `wait` waits for the end."""
        arguments = ctypes.c_void_p(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes)
        self._call("cuMemcpyDtoHAsync_v2", *arguments, ctypes.c_void_p(stream))

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Begin to copy `num_bytes` bytes from pinned memory at the address `source` to GPU memory at `target`, as work
        of the CUDA stream `stream`; `wait` waits for the end."""
        arguments = ctypes.c_uint64(target), ctypes.c_void_p(source), ctypes.c_size_t(num_bytes)
        self._call("cuMemcpyHtoDAsync_v2", *arguments, ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise TandemError(
                ErrorKind.UNSUPPORTED, f"the CUDA driver refuses {name} (CUresult {code})", param="device"
            )
