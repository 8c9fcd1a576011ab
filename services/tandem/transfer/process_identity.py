"""Which process of which host this is, so that a recycled pid is noticed; never signals or reads memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_START_TIME_FIELD = 22
"""Of /proc/PID/stat, counted from 1 as proc(5) does: clock ticks between boot and the start of the process."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One life of one process. `host` is equal only for processes that can address each other by pid."""

    host: str
    pid: int
    start_ticks: int


def this_process() -> ProcessIdentity:
    pid = os.getpid()
    return ProcessIdentity(host_identity(), pid, start_ticks(pid))


def host_identity() -> str:
    """One boot of one kernel, and the pid namespace: what makes a pid mean the same to two processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def machine_identity() -> str:
    """One boot of one kernel, in whatever container; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_ticks(pid: int) -> int:
    """When the process that has this pid now started. Raises ProcessLookupError when none has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        raise ProcessLookupError(f"no process has pid {pid}") from None
    # The second field, the command in parentheses, may itself hold spaces and parentheses.
    fields_from_third = stat.rpartition(")")[2].split()
    return int(fields_from_third[_START_TIME_FIELD - 3])
