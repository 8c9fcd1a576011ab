"""Identify a process of a host across pid reuse, by its start time and the boot of its kernel."""

from __future__ import annotations

import os
from pathlib import Path

_START_TIME_FIELD = 22
"""Field of /proc/PID/stat, counted from 1 as in proc(5): start time of the process in clock ticks since boot."""


def host_identity() -> str:
    """Return a text made of the kernel's boot id and the pid namespace.

    In two processes with equal texts, a pid names the same process.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def machine_identity() -> str:
    """Return the boot id of the kernel, which is the same in all containers of a machine; an empty text where it cannot
    be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_ticks(pid: int) -> int:
    """Return the start time, in clock ticks since boot, of the process that has `pid` now. Raises ProcessLookupError
    when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        raise ProcessLookupError(f"no process has pid {pid}") from None
    # The second field, the command in parentheses, may itself hold spaces and parentheses.
    fields_from_third = stat.rpartition(")")[2].split()
    return int(fields_from_third[_START_TIME_FIELD - 3])
