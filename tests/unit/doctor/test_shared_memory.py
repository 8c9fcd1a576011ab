"""Test the check of shared memory."""

from __future__ import annotations

from pathlib import Path

from tandem.doctor.shared_memory import SharedMemory, judge_shared_memory, read_shared_memory
from tandem.doctor.system import System
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_warns

MIB = 1 << 20


def test_the_size_is_read_from_the_file_system(tmp_path: Path) -> None:
    assert read_shared_memory(System(tmp_path)) is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = read_shared_memory(System(tmp_path))
    assert found is not None and 0 < found.num_free_bytes <= found.num_bytes


def test_enough() -> None:
    assert_fine(judge_shared_memory(SharedMemory(2048 * MIB, 2000 * MIB)), "shared-memory", "2.0GiB of 2GiB are free")


def test_docker_s_default_is_too_little() -> None:
    finding = judge_shared_memory(SharedMemory(64 * MIB, 64 * MIB))
    assert_fails(finding, "shared-memory", "64MiB of 64MiB are free", "--shm-size=1g")
    assert "`pools.<name>.sharedMemory: 1Gi`" in finding.fix


def test_a_full_shared_memory_fails() -> None:
    finding = judge_shared_memory(SharedMemory(2048 * MIB, 10 * MIB))
    assert_fails(finding, "shared-memory", "10MiB of 2GiB are free", "`ls -l /dev/shm`")


def test_a_small_shared_memory_is_a_warning() -> None:
    finding = judge_shared_memory(SharedMemory(512 * MIB, 512 * MIB))
    assert_warns(finding, "shared-memory", "a few small workers only", "--shm-size=1g")


def test_none_at_all() -> None:
    assert_fails(judge_shared_memory(None), "shared-memory", "there is no /dev/shm", "--shm-size=1g")
