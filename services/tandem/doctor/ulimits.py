"""Check the kernel's limits of this process: locked memory and open files."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.doctor import size
from tandem.doctor.finding import Finding, fail, ok, skip, warn
from tandem.doctor.system import System

_IPC_LOCK_BIT = 14
"""CAP_IPC_LOCK of capabilities(7): a process with it may lock any amount."""
OWN_FILES = 1024
"""Open files of a gateway besides client connections: connections to workers and Redis, logs, libraries."""


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits of this process; None means unlimited.

    `memlock`: soft limit of locked memory in bytes. `open_files`: hard limit, to which a process may raise its own.
    """

    memlock: int | None
    has_ipc_lock: bool
    open_files: int | None


def read_limits(system: System) -> ResourceLimits:
    """Read the limits from /proc. Raises ValueError if a line is missing."""
    lines = system.text("/proc/self/limits").splitlines()
    return ResourceLimits(_soft(lines, "Max locked memory"), _has_ipc_lock(system), _hard(lines, "Max open files"))


def judge_memlock(limits: ResourceLimits, pool_bytes: int, uses_rdma: bool) -> Finding:
    """Report whether the KV pool can be locked: RDMA registers `pool_bytes` of host memory, which locks them."""
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
        "`ulimit -l unlimited` (limits.conf: `* - memlock unlimited`; systemd: LimitMEMLOCK=infinity; "
        "docker: --ulimit memlock=-1; Kubernetes: LimitMEMLOCK=infinity of the nodes' containerd or CRI-O, of which "
        "pods have it)",
    )


def judge_open_files(limits: ResourceLimits, max_connections: int) -> Finding:
    needed = max_connections + OWN_FILES
    if limits.open_files is None or limits.open_files >= needed:
        allowed = "any number of" if limits.open_files is None else f"{limits.open_files:,}"
        return ok("open-files", f"{allowed} files may be open, a gateway needs {needed:,} at most")
    return warn(
        "open-files",
        f"{limits.open_files:,} files may be open, and gateway.max_connections={max_connections} needs {needed:,}",
        f"`ulimit -Hn {needed}` (systemd: LimitNOFILE={needed}), or a gateway.max_connections of "
        f"{max(1, limits.open_files - OWN_FILES)}",
    )


def _values(lines: list[str], name: str) -> list[str]:
    for line in lines:
        if line.startswith(name):
            return line.removeprefix(name).split()
    raise ValueError(f"/proc/self/limits has no line of {name!r}")


def _soft(lines: list[str], name: str) -> int | None:
    return _number(_values(lines, name)[0])


def _hard(lines: list[str], name: str) -> int | None:
    return _number(_values(lines, name)[1])


def _number(text: str) -> int | None:
    return None if text == "unlimited" else int(text)


def _has_ipc_lock(system: System) -> bool:
    for line in system.text("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _IPC_LOCK_BIT & 1)
    return False


def _size(num_bytes: int | None) -> str:
    return "any amount" if num_bytes is None else size.format_bytes(num_bytes)
