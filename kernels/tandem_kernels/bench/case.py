"""What one measurement consists of and what comes of it, all values; never runs one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from tandem_kernels.bench.grid import Grid
from tandem_kernels.bench.roofline import DeviceLimits
from tandem_kernels.bench.timing import Call, KernelTiming, Stopwatch
from tandem_kernels.dispatch import Kernels


class NotHere(Exception):
    """A case cannot be measured on this machine; says why."""


@dataclass(frozen=True, slots=True)
class Bench:
    """All that a case needs. `memory_bytes` is the device's."""

    device: torch.device
    kernels: Kernels
    stopwatch: Stopwatch
    grid: Grid
    memory_bytes: int

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True, slots=True)
class Work:
    """`run` is what is timed. `num_bytes` is the least that it must move, each input read once and each output written
    once; `flops` the least that its matrix products take. `rivals` do the same work another way; those in `agreeing`
    yield the same tensor but for rounding, at most `tolerance` away in the norm. Rivals named in `waits` wait for the
    device."""

    run: Callable[[], object]
    num_bytes: int
    flops: int = 0
    rivals: Mapping[str, Call] = field(default_factory=dict)
    agreeing: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    tolerance: float = 0.0
    waits: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class BenchCase:
    """`build` allocates; it may raise NotHere."""

    group: str
    name: str
    build: Callable[[Bench], Work]


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One case measured. `share` is the time that the limits of this machine would take, of the median."""

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


def share_of(work: Work, seconds: float, limits: DeviceLimits) -> float:
    """The larger of moving the bytes at the rate of a copy and of multiplying, over `seconds`."""
    return max(work.num_bytes / limits.copy_bytes_s, work.flops / limits.matrix_flops_s) / seconds
