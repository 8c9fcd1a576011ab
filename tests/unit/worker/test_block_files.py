"""Test that a block file is served complete or not at all, and that the least recently used files are deleted."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.core.ids import BlockHash
from tandem.worker.kv.block_files import HEADER_BYTES, STALE_S, SUFFIX, BlockFiles

BLOCK_BYTES = 10_000
FILE_BYTES = HEADER_BYTES + BLOCK_BYTES
DIGESTS = (3, 1 << 63)


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def content(number: int) -> bytes:
    return number.to_bytes(4, "big") * (BLOCK_BYTES // 4)


def block_files(directory: Path, number: int = 4) -> BlockFiles:
    return BlockFiles(directory / "model", BLOCK_BYTES, len(DIGESTS), number * FILE_BYTES + 1)


def write(files: BlockFiles, number: int) -> list[BlockHash]:
    """Write a block, and return those whose files were deleted for it."""
    changes = files.write(name(number), memoryview(content(number)), DIGESTS)
    assert changes.added == [name(number)]
    return list(changes.removed)


def read(files: BlockFiles, number: int) -> bytes | None:
    into = bytearray(BLOCK_BYTES)
    digests = files.read(name(number), memoryview(into))
    assert digests in (DIGESTS, None)
    return None if digests is None else bytes(into)


def path_of(directory: Path, number: int) -> Path:
    (path,) = directory.rglob(f"{name(number).hex()}{SUFFIX}")
    return path


def test_another_process_finds_what_was_written_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    files = block_files(tmp_path)
    assert write(files, 1) == [] and write(files, 2) == []
    other = block_files(tmp_path)
    assert sorted(other.scan().added) == [name(1), name(2)] and len(other) == 2
    assert read(other, 1) == content(1) and read(other, 2) == content(2) and read(other, 3) is None
    assert other.scan() == ([], [])
    path = path_of(tmp_path, 1)
    assert [each.stat().st_mode & 0o077 for each in (path, path.parent, path.parent.parent)] == [0, 0, 0]


def test_the_file_used_least_recently_is_deleted(tmp_path: Path) -> None:
    files = block_files(tmp_path, 3)
    for number in (1, 2, 3):
        write(files, number)
    files.touch([name(3), name(1)])
    assert write(files, 4) == [name(2)] and read(files, 2) is None and read(files, 1) == content(1)
    assert write(files, 5) == [name(1)], "it is behind 3 in their prefix"
    assert len(list(tmp_path.rglob(f"*{SUFFIX}"))) == 3


def test_a_file_that_another_process_used_is_kept(tmp_path: Path) -> None:
    files, other = block_files(tmp_path, 2), block_files(tmp_path, 2)
    write(files, 1)
    write(files, 2)
    other.scan()
    other.touch([name(1)])
    assert write(files, 3) == [name(2)]


def test_a_scan_deletes_what_is_beyond_the_limit_and_reports_what_is_gone(tmp_path: Path) -> None:
    large = block_files(tmp_path, 9)
    for number in range(5):
        write(large, number)
        os.utime(path_of(tmp_path, number), (number, number))
    small = block_files(tmp_path, 2)
    changes = small.scan()
    assert changes.added == [name(3), name(4)] and set(changes.removed) == {name(0), name(1), name(2)}
    assert set(large.scan().removed) == {name(0), name(1), name(2)}


@pytest.mark.parametrize("num_bytes", [0, 10, HEADER_BYTES, FILE_BYTES - 1])
def test_a_file_that_was_cut_short_is_deleted(tmp_path: Path, num_bytes: int) -> None:
    files = block_files(tmp_path)
    write(files, 1)
    os.truncate(path_of(tmp_path, 1), num_bytes)
    assert read(files, 1) is None
    assert not list(tmp_path.rglob(f"*{SUFFIX}")) and len(files) == 0


def test_a_file_of_another_block_or_format_is_deleted(tmp_path: Path) -> None:
    files = block_files(tmp_path)
    write(files, 1)
    write(files, 2)
    path_of(tmp_path, 1).rename(path_of(tmp_path, 2))
    assert read(files, 2) is None
    write(files, 3)
    other = BlockFiles(files.directory, BLOCK_BYTES, 3, 1 << 20)
    assert other.read(name(3), memoryview(bytearray(BLOCK_BYTES))) is None


def test_a_write_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, buffers: list[object], offset: int) -> int:
        os.pwrite(file, b"part", offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    files = block_files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(OSError, match="No space"):
            write(files, 1)
        patch.setattr(os, "pwritev", lambda *_: 4)
        with pytest.raises(OSError, match="part of the block"):
            write(files, 1)
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [] and read(files, 1) is None
    write(files, 1)
    assert read(files, 1) == content(1)


def test_a_deleted_directory_is_made_again(tmp_path: Path) -> None:
    files = block_files(tmp_path)
    write(files, 1)
    files.directory.rename(tmp_path / "elsewhere")
    assert read(files, 1) is None
    write(files, 2)
    assert read(files, 2) == content(2) and files.directory.stat().st_mode & 0o077 == 0
    files.directory.rename(tmp_path / "elsewhere too")
    assert files.scan() == ([], [name(1), name(2)])


def test_a_limit_below_one_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        BlockFiles(tmp_path, BLOCK_BYTES, 1, FILE_BYTES - 1)


WRITER = """
import sys
from itertools import count
from pathlib import Path
from tests.unit.worker.test_block_files import block_files, write
files = block_files(Path(sys.argv[1]), 1000)
for number in count(int(sys.argv[2])):
    write(files, number % 1000)
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_no_torn_block(tmp_path: Path) -> None:
    for life in range(10):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(97 * life)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as writer:
            assert writer.stdout is not None
            for _ in range(20 + life):
                assert writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
    files = block_files(tmp_path, 1000)
    found = files.scan().added
    assert len(found) >= 200
    for block_hash in found:
        number = int.from_bytes(block_hash, "big")
        assert read(files, number) == content(number)
    for each in files.directory.rglob(".*"):
        os.utime(each, (1, 1))
    assert STALE_S > 0 and files.scan() == ([], [])
    assert [each.name for each in files.directory.rglob(".*")] == [".clock"]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
