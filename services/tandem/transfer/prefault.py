"""Fault in the pages of a fresh KV pool in host memory before the first request, without changing their content.

A pool is mapped but not written, so the kernel allocates each page on first access, and the pool hands out unused
blocks first. A huge page costs 0.2 ms where the kernel has free memory, and 5 ms on a virtual machine whose host must
find the memory first. Without prefaulting, steps that start new blocks and pulls into them would pay that price.

A low-priority thread that prefaults during serving is no alternative: with all cores busy it takes minutes, and it
may be descheduled while it holds the lock of the address space (measured: a concurrent mmap took up to 950 ms).
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

from tandem.transfer.memory_pool import MemoryPool

PIECE_BYTES = 16 << 20
"""Bytes of one madvise call. The calls are spread over threads, and a signal waits for one call at most."""
_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14: allocate pages as a write would, and keep the content of those that exist."""


def prefault(pool: MemoryPool, num_threads: int) -> None:
    """Allocate all memory pages of a pool in host memory with `num_threads` threads, and return when that is done. Does
    nothing for a pool in GPU memory.

    Where the kernel lacks the call or has no memory left, pages are allocated on first use instead.
    """
    libc = ctypes.CDLL(None)
    if pool.region.device != "cpu" or not hasattr(libc, "madvise"):
        return
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    page = os.sysconf("SC_PAGE_SIZE")
    start = -(-pool.region.address // page) * page
    stop = pool.region.address + pool.num_bytes

    def populate(address: int) -> None:
        libc.madvise(address, min(PIECE_BYTES, stop - address), _MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="tandem-pages") as threads:
        for _ in threads.map(populate, range(start, stop, PIECE_BYTES)):
            pass
