"""Makes the pages of a fresh KV pool exist before there is work; never changes what they hold.

A pool is mapped, not written, so each of its pages comes with the first access, and a pool hands out blocks that nobody
used yet first. A huge page costs 0.2 ms where the kernel has memory at hand, 5 ms on a virtual machine whose host has
to find it first. Without this steps that begin blocks and pulls into them pay for that. A thread of low priority beside
the work is no way out: with all cores busy it takes minutes, and is put aside while it holds the lock of the address
space (measured: an mmap beside it took up to 950 ms).
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

from tandem.transfer.memory_pool import MemoryPool

PIECE_BYTES = 16 << 20
"""Of one call into the kernel: dealt out to threads, and a signal waits for no longer than that."""
_MADV_POPULATE_WRITE = 23
"""Linux 5.14. Gives pages like a write does, and leaves alone what is there."""


def prefault(pool: MemoryPool, num_threads: int) -> None:
    """Returns when all pages of a pool in host memory exist; where the kernel knows no such call or has no memory left,
    pages come with their first use."""
    libc = ctypes.CDLL(None)
    if pool.device != "cpu" or not hasattr(libc, "madvise"):
        return
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    page = os.sysconf("SC_PAGE_SIZE")
    start, stop = -(-pool.address // page) * page, pool.address + pool.num_bytes

    def give(address: int) -> None:
        libc.madvise(address, min(PIECE_BYTES, stop - address), _MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="tandem-pages") as threads:
        for _ in threads.map(give, range(start, stop, PIECE_BYTES)):
            pass
