"""Fault in the pages of a fresh KV pool in host memory before their first use, without changing their content.

A pool is mapped but not written, so the kernel allocates each page on first access, and the pool hands out unused
blocks first. A huge page costs 0.2 ms where the kernel has free memory, and 5 ms on a virtual machine whose host must
find the memory first. Without prefaulting, steps that start new blocks and pulls into them would pay that price.

A worker's first rank faults the first pages in before it serves, and the others on a thread while it does, which makes
it ready 0.1 to 3 s per GiB earlier; the other ranks fault all in first. A pool that is larger than the memory of its
container is therefore noticed only while the worker serves. The thread holds the lock of the address space during each
call: beside two busy threads on two cores another thread's mmap waited up to 28 ms for calls of 2 MiB, up to 226 ms for
calls of 16 MiB, and up to 950 ms where the thread had a low priority, because it was descheduled while it held the
lock.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from operator import call

from tandem.transfer.memory_pool import MemoryPool

PIECE_BYTES = 2 << 20
"""Bytes of one madvise call, a huge page. The calls are spread over threads, and a signal waits for one call at most.
"""
FIRST_BYTES = 64 << 20
"""Bytes of a pool that are faulted in before a worker serves."""
_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14: allocate pages as a write would, and keep the content of those that exist."""


def prefault(pool: MemoryPool, num_threads: int, max_bytes: int | None = None) -> None:
    """Allocate the memory pages of a pool in host memory with `num_threads` threads, and return when that is done. Does
    nothing for a pool in GPU memory. `max_bytes`: allocate about so many bytes from the pool's start on; None: all.

    Where the kernel lacks the call or has no memory left, pages are allocated on first use instead.
    """
    calls = islice(_calls(pool), None if max_bytes is None else max_bytes // PIECE_BYTES)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="tandem-pages") as threads:
        for _ in threads.map(call, calls):
            pass


class BackgroundPrefault:
    """Allocate all memory pages of a pool in host memory on a thread of its own, from the pool's start on. Pages that
    exist cost nearly nothing."""

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool  # keeps the memory mapped while the thread runs
        self._has_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tandem-pages", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop after the current call. Returns False when the thread is still running after `timeout_s` seconds."""
        self._has_stopped.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        for populate in _calls(self._pool):
            if self._has_stopped.is_set():
                return
            populate()


def _calls(pool: MemoryPool) -> Iterator[Callable[[], object]]:
    """Yield calls that allocate a pool's pages piece by piece; none for GPU memory or where the C library lacks the
    function."""
    libc = ctypes.CDLL(None)
    if pool.region.device != "cpu" or not hasattr(libc, "madvise"):
        return
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    page = os.sysconf("SC_PAGE_SIZE")
    start = -(-pool.region.address // page) * page
    stop = pool.region.address + pool.num_bytes
    for address in range(start, stop, PIECE_BYTES):
        yield partial(libc.madvise, address, min(PIECE_BYTES, stop - address), _MADV_POPULATE_WRITE)
