"""Test the checks of the limits of locked memory, open files and shared memory."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.doctor.finding import Finding
from tandem.doctor.host import (
    ResourceLimits,
    check_shared_memory,
    judge_memlock,
    judge_open_files,
    read_limits,
)
from tandem.doctor.system import System
from tests.unit.doctor.trees import system
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns

GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.parametrize(("capabilities", "has_ipc_lock"), [("0000000000004000", True), ("0000000000000000", False)])
def test_this_process_s_limits_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capabilities: str, has_ipc_lock: bool
) -> None:
    here = system(tmp_path, {"/proc/self/status": f"Name:\tpython\nCapEff:\t{capabilities}\n"})
    pairs = {resource.RLIMIT_MEMLOCK: (8 << 20, 9 << 20), resource.RLIMIT_NOFILE: (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", pairs.__getitem__)
    assert read_limits(here) == ResourceLimits(8 << 20, has_ipc_lock, 4096)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert read_limits(here) == ResourceLimits(None, has_ipc_lock, None)


@pytest.mark.parametrize(
    "limits",
    [ResourceLimits(None, False, 1), ResourceLimits(8 << 20, True, 1), ResourceLimits(GIB, False, 1)],
    ids=["all", "cap", "enough"],
)
def test_enough_may_be_locked(limits: ResourceLimits) -> None:
    assert_fine(judge_memlock(limits, GIB, uses_rdma=True), "memlock", "may be locked")


@pytest.mark.parametrize(("memlock", "pool"), [(8 << 20, GIB), (GIB - 1, GIB), (8 << 20, 0)])
def test_rdma_locks_the_pool(memlock: int, pool: int) -> None:
    """Also if the size of the pool is known only after the weights are loaded."""
    finding = judge_memlock(ResourceLimits(memlock, False, 1), pool, uses_rdma=True)
    assert_fails(finding, "memlock", "RDMA locks the KV pool", "`ulimit -l unlimited`")
    assert "LimitMEMLOCK=infinity of the nodes' containerd or CRI-O" in finding.fix


def test_without_rdma_nothing_is_locked() -> None:
    assert_skips(
        judge_memlock(ResourceLimits(8 << 20, False, 1), GIB, uses_rdma=False), "memlock", "8MiB may be locked"
    )


def test_open_files() -> None:
    assert_fine(judge_open_files(ResourceLimits(None, False, 5120), 4096), "open-files", "5,120 files may be open")
    assert_fine(judge_open_files(ResourceLimits(None, False, None), 4096), "open-files", "any number of")
    few = judge_open_files(ResourceLimits(None, False, 5119), 4096)
    assert_warns(few, "open-files", "gateway.max_connections=4096 needs 5,120", "`ulimit -Hn 5120`")
    assert "gateway.max_connections=4095" in few.fix


def test_the_size_is_read_from_the_file_system(tmp_path: Path) -> None:
    assert_fails(check_shared_memory(System(tmp_path)), "shared-memory", "there is no /dev/shm", "--shm-size=1g")
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert "are free in /dev/shm" in check_shared_memory(System(tmp_path)).found


def judged(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> Finding:
    sizes = SimpleNamespace(total=total, free=free)
    monkeypatch.setattr("tandem.doctor.host.shutil.disk_usage", lambda _: sizes)
    return check_shared_memory(System())


def test_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fine(judged(monkeypatch, 2048 * MIB, 2000 * MIB), "shared-memory", "2.0GiB of 2GiB are free")


def test_docker_s_default_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = judged(monkeypatch, 64 * MIB, 64 * MIB)
    assert_fails(finding, "shared-memory", "64MiB of 64MiB are free", "--shm-size=1g")
    assert "`pools.<name>.sharedMemory: 1Gi`" in finding.fix


def test_a_full_shared_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = judged(monkeypatch, 2048 * MIB, 10 * MIB)
    assert_fails(finding, "shared-memory", "10MiB of 2GiB are free", "`ls -l /dev/shm`")


def test_a_small_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = judged(monkeypatch, 512 * MIB, 512 * MIB)
    assert_warns(finding, "shared-memory", "a few small workers only", "--shm-size=1g")
