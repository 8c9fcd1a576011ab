"""Provide memory of the host and of a GPU behind one interface: allocate it, share it with another process, copy it.

Copies use the system's own calls, piece by piece. On a GPU these are the driver's calls, without a runtime:
cuMemcpyDtoDAsync is what cudaMemcpyAsync calls.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any, Protocol

from tandem.transfer.process_memory import CopySpan, ProcessMemory

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_HOST = struct.Struct("<qQ")


class DeviceMemory(Protocol):
    """Interface to the memory of one device, for allocation, sharing between processes and copies.

    Addresses are this process's own; `device` is named as in `MemoryPool`.
    """

    @property
    def device(self) -> str: ...

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory that lives until the process ends, and return its address."""
        ...

    def write(self, address: int, content: bytes) -> None: ...

    def read(self, address: int, num_bytes: int) -> bytes: ...

    def share(self, address: int) -> bytes:
        """Return what another process needs to open the allocation at `address`."""
        ...

    def open(self, shared: bytes) -> int:
        """Open an allocation that another process shared, and return the address that `copy` takes."""
        ...

    def copy(self, spans: Sequence[CopySpan]) -> None:
        """Copy each span with a call of its own from the other process's allocation to local memory, and wait for all.

        The allocation is the one that was opened last.
        """
        ...


class BenchHostMemory:
    """Host memory of this process, which other processes read with process_vm_readv."""

    device = "cpu"

    def __init__(self) -> None:
        self._process = ProcessMemory()
        self._process.allow_readers()
        self._kept: list[mmap.mmap] = []
        self._owner = 0

    def allocate(self, num_bytes: int) -> int:
        self._kept.append(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return ctypes.addressof(ctypes.c_char.from_buffer(self._kept[-1]))

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))

    def read(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)

    def share(self, address: int) -> bytes:
        return _HOST.pack(os.getpid(), address)

    def open(self, shared: bytes) -> int:
        self._owner, address = _HOST.unpack(shared)
        return int(address)

    def copy(self, spans: Sequence[CopySpan]) -> None:
        for span in spans:
            self._process.read(self._owner, (span,))


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class CudaMemory:
    """Memory of one GPU, which other processes open over CUDA's interprocess handles.

    Raises RuntimeError with the driver's name for the error; OSError where there is no driver.
    """

    def __init__(self, ordinal: int = 0, library: str = "libcuda.so.1") -> None:
        self._cuda: Any = ctypes.CDLL(library)
        self.device = f"cuda:{ordinal}"
        device, context, self._stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        # The primary context, which torch uses too, so that all users in this process share it.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(_NON_BLOCKING))

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def write(self, address: int, content: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content, ctypes.c_size_t(len(content)))

    def read(self, address: int, num_bytes: int) -> bytes:
        content = ctypes.create_string_buffer(num_bytes)
        self._call("cuMemcpyDtoH_v2", content, ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))
        return content.raw

    def share(self, address: int) -> bytes:
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, shared: bytes) -> int:
        address, handle = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(shared)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def copy(self, spans: Sequence[CopySpan]) -> None:
        copy, stream = self._cuda.cuMemcpyDtoDAsync_v2, self._stream
        copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        for span in spans:
            if code := copy(span.target, span.source, span.num_bytes, stream):
                raise RuntimeError(f"cuMemcpyDtoDAsync_v2: {self._name(code)}")
        self._call("cuStreamSynchronize", stream)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {self._name(code)}")

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        return text.value.decode() if text.value else f"error {code}"


def open_memory(device: str) -> DeviceMemory:
    """Return the memory of the device `cpu` or `cuda`."""
    return BenchHostMemory() if device == "cpu" else CudaMemory()
