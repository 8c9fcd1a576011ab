"""Export CPU time, memory and open files of this process, read from /proc; nothing where there is no /proc."""

from __future__ import annotations

import os
from pathlib import Path

from tandem.obs.metrics.instruments import PROCESS_CPU, PROCESS_FILES, PROCESS_MEMORY
from tandem.obs.metrics.metrics import Metrics

_STAT, _STATM, _FILES = Path("/proc/self/stat"), Path("/proc/self/statm"), Path("/proc/self/fd")
_RESIDENT = 1
"""Index in /proc/self/statm, in pages."""
_USER, _SYSTEM = 11, 12
"""Indices in /proc/self/stat behind the process name, in clock ticks. proc(5) counts from 1, and the name is field
2."""


def watch_process(metrics: Metrics) -> None:
    """Register the CPU time, memory and open files of this process, which are read at each collection; does nothing
    where there is no /proc."""
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
