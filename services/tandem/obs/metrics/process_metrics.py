"""What the operating system says of this process; never of others, and nothing where there is no /proc."""

from __future__ import annotations

import os
from pathlib import Path

from tandem.obs.metrics.instruments import PROCESS_CPU, PROCESS_FILES, PROCESS_MEMORY
from tandem.obs.metrics.metrics import Metrics

_STAT, _STATM, _FILES = Path("/proc/self/stat"), Path("/proc/self/statm"), Path("/proc/self/fd")
_RESIDENT = 1
"""Of /proc/self/statm, in pages."""
_USER, _SYSTEM = 11, 12
"""Of /proc/self/stat behind the name, in ticks (proc(5) counts them from 1, and the name is the second)."""


def watch_process(metrics: Metrics) -> None:
    """Processor time, memory and open files, read at each collection."""
    if _STAT.exists():
        metrics.watch(PROCESS_CPU, lambda: {(): _cpu_seconds()})
        metrics.watch(PROCESS_MEMORY, lambda: {(): _resident_bytes()})
        metrics.watch(PROCESS_FILES, lambda: {(): _num_files()})


def _cpu_seconds() -> float:
    fields = _STAT.read_text().rpartition(")")[2].split()
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes() -> float:
    return int(_STATM.read_text().split()[_RESIDENT]) * os.sysconf("SC_PAGE_SIZE")


def _num_files() -> float:
    return len(os.listdir(_FILES))
