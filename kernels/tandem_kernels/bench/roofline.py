"""Measure the machine's limits for the roofline: copy bandwidth, matrix rate and launch time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem_kernels.bench.grid import Grid
from tandem_kernels.bench.timing import KernelTiming, Stopwatch

_LAUNCHES = 200


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Measured limits of a device, in bytes per second, operations per second and seconds.

    `copy_bytes_s`: bytes read plus bytes written. `matrix_flops_s`: the best rate of `matrices`, whose keys are rows x
    inner x columns. `launch_eager_s`, `launch_graph_s`: time per kernel launch from Python and in a graph. `empty_s`:
    measured time of a kernel that hardly computes; a kernel's time near it is launch overhead.
    """

    copy_bytes_s: float
    read_bytes_s: float
    matrix_flops_s: float
    launch_eager_s: float
    launch_graph_s: float
    empty_s: float
    copy: KernelTiming
    matrices: dict[str, float]


def measure_limits(device: torch.device, dtype: torch.dtype, stopwatch: Stopwatch, grid: Grid) -> DeviceLimits:
    """Measure the limits of a device, with random numbers because zeros multiply faster."""
    copy, read = _memory(device, stopwatch, grid.copy_bytes)
    matrices = {
        f"{rows} x {inner} x {columns}": _matrix(device, dtype, stopwatch, (rows, inner, columns))
        for rows, inner, columns in grid.matrices
    }
    small = torch.zeros(32, device=device)
    eager_s, graph_s = stopwatch.launch(lambda: small.add_(1.0), _LAUNCHES)
    return DeviceLimits(
        copy_bytes_s=2 * grid.copy_bytes / copy.median_s,
        read_bytes_s=grid.copy_bytes / read.median_s,
        matrix_flops_s=max(matrices.values()),
        launch_eager_s=eager_s,
        launch_graph_s=graph_s,
        empty_s=stopwatch.time(lambda: small.add_(1.0)).median_s,
        copy=copy,
        matrices=matrices,
    )


def _memory(device: torch.device, stopwatch: Stopwatch, num_bytes: int) -> tuple[KernelTiming, KernelTiming]:
    """Time a copy and a sum of `num_bytes` bytes."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return stopwatch.time(lambda: target.copy_(source)), stopwatch.time(lambda: source.sum())


def _matrix(device: torch.device, dtype: torch.dtype, stopwatch: Stopwatch, sizes: tuple[int, int, int]) -> float:
    """Return the operations per second of a product `[rows, inner] x [inner, columns]`."""
    rows, inner, columns = sizes
    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(columns, inner, device=device).to(dtype)
    timing = stopwatch.time(lambda: torch.nn.functional.linear(left, right))
    return 2 * rows * inner * columns / timing.median_s
