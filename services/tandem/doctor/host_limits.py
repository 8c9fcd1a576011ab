"""Check this machine's limits: locked memory and open files of a process, and the size of shared memory."""

from __future__ import annotations

import re
import resource
import shutil
from dataclasses import dataclass

from tandem.doctor.finding import Finding, fail, format_bytes, ok, skip, warn
from tandem.doctor.system import System

_IPC_LOCK_BIT = 14
"""Bit of CAP_IPC_LOCK (capabilities(7)): a process with this capability may lock any amount of memory."""
OWN_FILES = 1024
"""Open files of a gateway besides client connections: connections to workers and Redis, logs, libraries."""
SHM_DIRECTORY = "/dev/shm"
SHM_NEEDED_BYTES = 160 << 20
"""Shared memory for Ray's object store (100 MiB if `serve` starts it) and about 10 MiB of UCX's queues for each of a
few workers."""
SHM_USUAL_BYTES = 1 << 30
"""Shared memory that is enough for more workers. Docker's default of 64 MiB is less than `SHM_NEEDED_BYTES`."""


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Hold the resource limits of this process; None means unlimited.

    `memlock`: soft limit of locked memory in bytes. `has_ipc_lock`: whether the process may lock any amount
    (CAP_IPC_LOCK). `open_files`: hard limit of open files, up to which the process may raise its soft limit."""

    memlock: int | None
    has_ipc_lock: bool
    open_files: int | None


def read_limits(system: System) -> ResourceLimits:
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ResourceLimits(
        None if memlock == resource.RLIM_INFINITY else memlock,
        _has_ipc_lock(system),
        None if open_files == resource.RLIM_INFINITY else open_files,
    )


def judge_memlock(limits: ResourceLimits, pool_bytes: int, uses_rdma: bool) -> Finding:
    """Return a finding on whether this process may lock the memory of the KV pool, as RDMA does with memory that it
    uses.

    `limits`: resource limits of this process. `pool_bytes`: size of the KV pool. `uses_rdma`: whether an RDMA device is
    usable; otherwise the check is skipped."""
    if not uses_rdma:
        return skip("memlock", f"{_size(limits.memlock)} may be locked; nothing is, because there is no RDMA device")
    if limits.has_ipc_lock:
        return ok("memlock", "any amount may be locked (CAP_IPC_LOCK)")
    if limits.memlock is None:
        return ok("memlock", "any amount may be locked")
    if limits.memlock >= pool_bytes > 0:
        return ok("memlock", f"{_size(limits.memlock)} may be locked, the KV pool is {_size(pool_bytes)}")
    return fail(
        "memlock",
        f"{_size(limits.memlock)} may be locked, and RDMA locks the KV pool of {_size(pool_bytes)} and its own queues",
        "run `ulimit -l unlimited` (limits.conf: `* - memlock unlimited`; systemd: LimitMEMLOCK=infinity; "
        "docker: --ulimit memlock=-1; Kubernetes: LimitMEMLOCK=infinity of the nodes' containerd or CRI-O, from which "
        "pods inherit it)",
    )


def judge_open_files(limits: ResourceLimits, max_connections: int) -> Finding:
    limit = limits.open_files
    needed = max_connections + OWN_FILES
    if limit is None or limit >= needed:
        allowed = "any number of" if limit is None else f"{limit:,}"
        return ok("open-files", f"{allowed} files may be open, a gateway needs {needed:,} at most")
    return warn(
        "open-files",
        f"{limit:,} files may be open, and gateway.max_connections={max_connections} needs {needed:,}: beyond, "
        "connections fail",
        f"run `ulimit -Hn {needed}` (systemd: LimitNOFILE={needed}), or set gateway.max_connections="
        f"{max(1, limit - OWN_FILES)}",
    )


def _has_ipc_lock(system: System) -> bool:
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", system.text("/proc/self/status"), re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> _IPC_LOCK_BIT & 1)


def _size(num_bytes: int | None) -> str:
    return "any amount" if num_bytes is None else format_bytes(num_bytes)


def check_shared_memory(system: System) -> Finding:
    fix = (
        "run `mount -o remount,size=1G /dev/shm`; docker: set --shm-size=1g; in a pod set "
        "`pools.<name>.sharedMemory: 1Gi`"
    )
    try:
        size = shutil.disk_usage(system.path(SHM_DIRECTORY))
    except OSError:
        return fail("shared-memory", f"there is no {SHM_DIRECTORY}, which Ray and UCX need for shared memory", fix)
    summary = f"{format_bytes(size.free)} of {format_bytes(size.total)} are free in {SHM_DIRECTORY}"
    if size.free < SHM_NEEDED_BYTES:
        if size.total >= SHM_NEEDED_BYTES:
            fix = f"delete files that crashed processes left (`ls -l {SHM_DIRECTORY}`), or enlarge it: {fix}"
        return fail("shared-memory", f"{summary}, and a Ray with workers needs {format_bytes(SHM_NEEDED_BYTES)}", fix)
    if size.total < SHM_USUAL_BYTES:
        return warn("shared-memory", f"{summary}, enough for a few small workers only", fix)
    return ok("shared-memory", summary)
