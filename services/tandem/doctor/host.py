"""Check this machine itself: the processor's vector instructions and the C++ compiler, which compiled CPU kernels need;
the limits of locked memory and open files of a process; and the size of shared memory.
"""

from __future__ import annotations

import platform
import re
import resource
import shutil
from dataclasses import dataclass

from tandem.core.config import Config
from tandem.doctor.finding import Finding, fail, format_bytes, ok, skip, warn, wrong
from tandem.doctor.system import System

COMPILERS = ("c++", "g++", "clang++")
"""Used if CXX is unset; the first that is found builds the kernels."""
_VECTORS = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("asimd", "NEON"))
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


def check_cpu(system: System, config: Config) -> tuple[Finding, ...]:
    """Return findings on the processor's vector instructions and on the C++ compiler, which CPU kernels need. Skipped
    if model.device is cuda.

    Without vector instructions or compiler a CPU worker computes correctly but slowly, which is a warning. A missing
    compiler is a failure if engine.kernels is compiled."""
    if config.model.device == "cuda":
        return (skip("cpu", "model.device is cuda, which uses no CPU kernels"),)
    return (_vectors(system), _compiler(system, is_fatal=config.engine.kernels == "compiled"))


def _vectors(system: System) -> Finding:
    lines = system.text("/proc/cpuinfo").splitlines()
    features = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    machine = platform.machine()
    for flag, name in _VECTORS:
        if flag in features:
            return ok("cpu", f"{machine} with {name}")
    summary = f"{machine} with none of {', '.join(name for _, name in _VECTORS)}"
    return warn("cpu", f"{summary}: steps take several times as long", "run workers on a processor with AVX2 or NEON")


def _compiler(system: System, *, is_fatal: bool) -> Finding:
    for name in filter(None, (system.environ.get("CXX"), *COMPILERS)):
        if found := shutil.which(name, path=system.environ.get("PATH")):
            return ok("compiler", found)
    return wrong(
        "compiler",
        f"no C++ compiler ({', '.join(COMPILERS)}): CPU kernels cannot be built, and torch's own are slower",
        "run `apt-get install g++`, or set CXX to the path of one; engine.kernels=reference does without",
        is_fatal=is_fatal,
    )


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
