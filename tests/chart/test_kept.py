"""What is kept of a program's answers is what it would say now, or it is asked again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chart import kept
from tests.chart.kept import Said, ask, digest_of


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty, and of this test alone."""
    digest_of.cache_clear()
    monkeypatch.setattr(kept, "PLACE", tmp_path / "kept")
    yield tmp_path / "kept"
    digest_of.cache_clear()


@pytest.fixture
def program(tmp_path: Path) -> str:
    """Writes its arguments and its input, fails, and counts its runs."""
    path = tmp_path / "program"
    path.write_text('#!/bin/sh\necho "$@"; cat; echo no >&2; echo run >> "$0.runs"; exit 3\n')
    path.chmod(0o755)
    return str(path)


def num_runs(program: str) -> int:
    return len(Path(f"{program}.runs").read_text().splitlines())


def test_the_same_is_asked_once(program: str, tmp_path: Path) -> None:
    for _ in range(2):
        assert ask([program, "a"], values="b\n", reads=[tmp_path / "program"]) == Said(3, "a\nb\n", "no\n")
    assert num_runs(program) == 1


def test_whatever_changes_is_asked_again(program: str, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "linked")
    ask([program, "a"], values="b", reads=[folder])
    ask([program, "b"], values="b", reads=[folder])
    ask([program, "a"], values="c", reads=[folder])
    assert num_runs(program) == 3
    for number, file in enumerate((folder / "file", tmp_path / "linked" / "file")):
        file.write_text("x")
        digest_of.cache_clear()
        ask([program, "a"], values="b", reads=[folder])
        assert num_runs(program) == 4 + number


def test_temporary_files_are_known_by_what_is_told_of_them(program: str) -> None:
    assert (
        ask([program, "/tmp/1"], told=["text"]).stdout == ask([program, "/tmp/2"], told=["text"]).stdout == "/tmp/1\n"
    )
    assert ask([program, "/tmp/1"], told=["other"]).stdout == "/tmp/1\n" and num_runs(program) == 2


def test_that_a_program_was_killed_is_no_answer(tmp_path: Path, place: Path) -> None:
    path = tmp_path / "killed"
    path.write_text("#!/bin/sh\nkill -9 $$\n")
    path.chmod(0o755)
    assert ask([str(path)]).returncode == -9 and not place.exists()


@pytest.mark.parametrize("found", [b"", b"no gzip", b"\x1f\x8b"])
def test_what_cannot_be_read_is_asked_again(program: str, place: Path, found: bytes) -> None:
    ask([program])
    (file,) = place.iterdir()
    file.write_bytes(found)
    assert ask([program]).returncode == 3 and num_runs(program) == 2
    assert ask([program]).returncode == 3 and num_runs(program) == 2
