"""Check the size of shared memory, which Ray and transfers within a machine need."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tandem.doctor import size
from tandem.doctor.finding import Finding, fail, ok, warn
from tandem.doctor.system import System

DIRECTORY = "/dev/shm"
NEEDED_BYTES = 160 << 20
"""For Ray's object store (100 MiB if `serve` starts it) and about 10 MiB of UCX's queues for each of a few workers."""
USUAL_BYTES = 1 << 30
"""Enough for more workers. Docker's default of 64 MiB is less than `NEEDED_BYTES`."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    num_bytes: int
    num_free_bytes: int


def read_shared_memory(system: System) -> SharedMemory | None:
    """Read the size of shared memory; returns None if there is none."""
    try:
        found = os.statvfs(system.path(DIRECTORY))
    except OSError:
        return None
    return SharedMemory(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def judge_shared_memory(found: SharedMemory | None) -> Finding:
    fix = "docker: --shm-size=1g; in a pod `pools.<name>.sharedMemory: 1Gi`; else `mount -o remount,size=1G /dev/shm`"
    if found is None:
        return fail("shared-memory", f"there is no {DIRECTORY}, which Ray and UCX need for shared memory", fix)
    summary = (
        f"{size.format_bytes(found.num_free_bytes)} of {size.format_bytes(found.num_bytes)} are free in {DIRECTORY}"
    )
    if found.num_bytes < NEEDED_BYTES:
        return fail("shared-memory", f"{summary}, and a Ray with workers needs {size.format_bytes(NEEDED_BYTES)}", fix)
    if found.num_free_bytes < NEEDED_BYTES:
        emptied = f"delete files that crashed processes left (`ls -l {DIRECTORY}`), or make it larger: {fix}"
        return fail(
            "shared-memory", f"{summary}, and a Ray with workers needs {size.format_bytes(NEEDED_BYTES)}", emptied
        )
    if found.num_bytes < USUAL_BYTES:
        return warn("shared-memory", f"{summary}, enough for a few small workers only", fix)
    return ok("shared-memory", summary)
