"""Read memory of another process through the kernel, by process_vm_readv(2)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_SPANS = 1024
"""Most spans of one call, a limit of the kernel (UIO_MAXIOV)."""

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


@dataclass(frozen=True, slots=True)
class CopySpan:
    """Describe one piece of a read: `num_bytes` bytes from address `source` of the other process to address `target` of
    this process."""

    source: int
    target: int
    num_bytes: int


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class ProcessMemory:
    """Read memory of other processes by process_vm_readv(2) of the C library. Raises OSError where the platform lacks
    the call."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "process_vm_readv"):
            raise OSError("this platform has no process_vm_readv")
        libc.process_vm_readv.restype = ctypes.c_ssize_t
        self._readv: Callable[..., int] = libc.process_vm_readv
        self._prctl: Callable[..., int] = libc.prctl

    def allow_readers(self) -> None:
        """Allow other processes of the same user to read this process where the Yama security module forbids that by
        default.

        The kernel's own check of user and capabilities remains. Without Yama the call does nothing.
        """
        self._prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)

    def read(self, pid: int, spans: Sequence[CopySpan]) -> None:
        """Copy the bytes of `spans`, at most MAX_SPANS, in order from process `pid`, which may be this one; return once
        all are copied.

        Raises ProcessLookupError (no such process), PermissionError, or OSError (EFAULT: a source is not mapped). After
        an error the content of the targets is undefined; nothing is written to them after the call.
        """
        count = len(spans)
        targets = (_IoVec * count)(*(_IoVec(span.target, span.num_bytes) for span in spans))
        sources = (_IoVec * count)(*(_IoVec(span.source, span.num_bytes) for span in spans))
        expected = sum(span.num_bytes for span in spans)
        done = self._readv(pid, targets, ctypes.c_ulong(count), sources, ctypes.c_ulong(count), ctypes.c_ulong(0))
        if done < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        if done != expected:
            raise OSError(f"only {done} of {expected} bytes are mapped in process {pid}")
