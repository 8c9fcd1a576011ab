"""How much shared memory there is for Ray and for transfers within a machine; never takes any."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tandem.doctor import size
from tandem.doctor.finding import Finding, fail, ok, warn
from tandem.doctor.system import System

DIRECTORY = "/dev/shm"
NEEDED_BYTES = 160 << 20
"""Ray's object store, of 100 MiB where `serve` starts it, and some 10 MiB of UCX's queues for each of a few workers."""
USUAL_BYTES = 1 << 30
"""What leaves room for more workers. Docker gives 64 MiB, which is too little for either."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    num_bytes: int
    num_free_bytes: int


def read_shared_memory(system: System) -> SharedMemory | None:
    """None where there is none."""
    try:
        found = os.statvfs(system.path(DIRECTORY))
    except OSError:
        return None
    return SharedMemory(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def judge_shared_memory(found: SharedMemory | None) -> Finding:
    fix = "docker: --shm-size=1g; in a pod `pools.<name>.sharedMemory: 1Gi`; else `mount -o remount,size=1G /dev/shm`"
    if found is None:
        return fail("shared-memory", f"there is no {DIRECTORY}, where Ray and UCX keep what processes share", fix)
    told = f"{size.format_bytes(found.num_free_bytes)} of {size.format_bytes(found.num_bytes)} are free in {DIRECTORY}"
    if found.num_bytes < NEEDED_BYTES:
        return fail("shared-memory", f"{told}, and a Ray with workers needs {size.format_bytes(NEEDED_BYTES)}", fix)
    if found.num_free_bytes < NEEDED_BYTES:
        emptied = f"end what fills it (`ls -l {DIRECTORY}` shows what crashed processes left), or make it larger: {fix}"
        return fail("shared-memory", f"{told}, and a Ray with workers needs {size.format_bytes(NEEDED_BYTES)}", emptied)
    if found.num_bytes < USUAL_BYTES:
        return warn("shared-memory", f"{told}, enough for a few small workers only", fix)
    return ok("shared-memory", told)
