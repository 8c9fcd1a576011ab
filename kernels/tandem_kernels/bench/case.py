"""Define the values of a measurement in the bench: the case, the work to time, and the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from tandem_kernels.bench.grid import Grid
from tandem_kernels.bench.roofline import DeviceLimits
from tandem_kernels.bench.timing import Call, KernelTiming, Stopwatch
from tandem_kernels.dispatch import Kernels


class CaseUnavailable(Exception):
    """Raised when a case cannot be measured on this machine; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Kernels, sizes and device with which the cases of a bench are built and measured.

    `kernels`: the kernels to measure. `grid`: the sizes to measure. `memory_bytes`: memory of the device.
    """

    device: torch.device
    kernels: Kernels
    stopwatch: Stopwatch
    grid: Grid
    memory_bytes: int

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True, slots=True)
class BenchWork:
    """A call to time, with the work that it must do and other implementations to compare with.

    - `run`: the timed call. `num_bytes`: the least bytes that it must move, each input read once and each output
      written once. `flops`: the least operations of its matrix products.
    - `rivals`: other implementations of the same work. `agreeing`: further rivals, whose result must equal that of
      `run` up to a relative error of `tolerance` in the norm.
    - `waits`: names of rivals that wait for the device, and so cannot be captured in a graph.
    """

    run: Callable[[], object]
    num_bytes: int
    flops: int = 0
    rivals: Mapping[str, Call] = field(default_factory=dict)
    agreeing: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    tolerance: float = 0.0
    waits: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class BenchCase:
    """A named measurement. `build` allocates its inputs; it may raise CaseUnavailable."""

    group: str
    name: str
    build: Callable[[Bench], BenchWork]


@dataclass(frozen=True, slots=True)
class BenchRow:
    """Result of one case.

    `timing`: time of one call. `num_bytes`, `flops`: the least bytes and operations that it needs. `share`: the time
    that the machine's limits allow, divided by the median time. `rivals`: times of other implementations.
    """

    group: str
    name: str
    timing: KernelTiming
    num_bytes: int
    flops: int
    share: float
    rivals: Mapping[str, KernelTiming]

    @property
    def bytes_s(self) -> float:
        return self.num_bytes / self.timing.median_s

    @property
    def flops_s(self) -> float:
        return self.flops / self.timing.median_s


def share_of(work: BenchWork, seconds: float, limits: DeviceLimits) -> float:
    """Return the least time that the machine's limits allow for the work, divided by `seconds`; 1 is the limit.

    The least time is the larger of moving the bytes at the rate of a copy and of multiplying at the matrix rate.
    """
    return max(work.num_bytes / limits.copy_bytes_s, work.flops / limits.matrix_flops_s) / seconds
