"""What a transport needs of the CUDA driver: a context for its thread, and whether memory can be shared; never copies.

By ctypes, so that a transport needs no torch. Why it is needed at all: a thread begins without a context, and UCX takes
cuda_ipc for unreachable when it looks at a peer's memory in one, without a word (openucx/ucx pull request 11240); and
memory of the driver's virtual memory calls, torch's expandable segments, has no handle that cuda_ipc passes on, so that
reads of it go over TCP at a hundredth of the rate (ai-dynamo/nixl issue 1754).
"""

from __future__ import annotations

import ctypes
from typing import Any

from tandem.core.errors import ErrorKind, TandemError

_LIBRARY = "libcuda.so.1"
_IS_LEGACY_CUDA_IPC_CAPABLE = 10
"""Of CUpointer_attribute: whether cuIpcGetMemHandle takes the memory."""


class CudaDriver:
    """The driver of this machine. Raises TandemError(UNSUPPORTED) where there is none. Any thread may call it."""

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = library or ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise TandemError(ErrorKind.UNSUPPORTED, f"there is no CUDA driver here: {error}", param="device") from None
        self._call("cuInit", ctypes.c_uint(0))

    def enter(self, number: int) -> None:
        """Make the primary context of a device, which torch uses too, the calling thread's. It is kept from then on."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def can_share(self, address: int) -> bool:
        """Whether other processes of this machine can map the memory at an address."""
        is_capable = ctypes.c_int(0)
        attribute = ctypes.c_int(_IS_LEGACY_CUDA_IPC_CAPABLE)
        self._call("cuPointerGetAttribute", ctypes.byref(is_capable), attribute, ctypes.c_uint64(address))
        return is_capable.value != 0

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise TandemError(
                ErrorKind.UNSUPPORTED, f"the CUDA driver refuses {name} (CUresult {code})", param="device"
            )
