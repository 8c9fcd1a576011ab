"""Measure how fast this machine is now, so that figures taken an hour apart can be compared.

The probe is a float32 product [512, 576] x [576, 1536] and a read of 512 MiB, on the given number of threads.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch

from loadtest.client.records import Probe, encode
from tandem.core.clock import Clock, SystemClock

_M, _K, _N = 512, 576, 1_536
_READ_BYTES = 512 << 20
_GEMMS = 40
_READS = 5


def measure(num_threads: int, clock: Clock) -> Probe:
    """Return the median speed of matrix products and of memory reads; takes about half a second."""
    torch.set_num_threads(num_threads)
    a, b = torch.ones(_M, _K), torch.ones(_N, _K)
    memory = torch.ones(_READ_BYTES // 4)
    gemm_s = _median(lambda: torch.nn.functional.linear(a, b), _GEMMS, clock)
    read_s = _median(lambda: memory.sum(), _READS, clock)
    return Probe(gflops=2 * _M * _K * _N / gemm_s / 1e9, read_gbs=_READ_BYTES / read_s / 1e9)


def _median(work: Callable[[], object], repeats: int, clock: Clock) -> float:
    work()
    times = []
    for _ in range(repeats):
        began = clock.now()
        work()
        times.append(clock.now() - began)
    return statistics.median(times)


if __name__ == "__main__":
    sys.stdout.buffer.write(encode(measure(int(sys.argv[1]), SystemClock())))
