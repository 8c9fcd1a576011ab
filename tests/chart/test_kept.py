"""Test the output cache: an entry equals what the program would write now, or the program runs again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chart import kept
from tests.chart.kept import ProgramOutput, digest_of, run_cached


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty cache folder of this test alone."""
    digest_of.cache_clear()
    monkeypatch.setattr(kept, "PLACE", tmp_path / "kept")
    yield tmp_path / "kept"
    digest_of.cache_clear()


@pytest.fixture
def program(tmp_path: Path) -> str:
    """Return the path of a script that writes its arguments and its input, fails, and counts its runs."""
    path = tmp_path / "program"
    path.write_text('#!/bin/sh\necho "$@"; cat; echo no >&2; echo run >> "$0.runs"; exit 3\n')
    path.chmod(0o755)
    return str(path)


def num_runs(program: str) -> int:
    return len(Path(f"{program}.runs").read_text().splitlines())


def test_the_same_command_runs_once(program: str, tmp_path: Path) -> None:
    for _ in range(2):
        assert run_cached([program, "a"], values="b\n", reads=[tmp_path / "program"]) == ProgramOutput(
            3, "a\nb\n", "no\n"
        )
    assert num_runs(program) == 1


def test_a_changed_argument_input_or_file_runs_the_command_again(program: str, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "linked")
    run_cached([program, "a"], values="b", reads=[folder])
    run_cached([program, "b"], values="b", reads=[folder])
    run_cached([program, "a"], values="c", reads=[folder])
    assert num_runs(program) == 3
    for number, file in enumerate((folder / "file", tmp_path / "linked" / "file")):
        file.write_text("x")
        digest_of.cache_clear()
        run_cached([program, "a"], values="b", reads=[folder])
        assert num_runs(program) == 4 + number


def test_key_arguments_replace_the_names_of_temporary_files_in_the_key(program: str) -> None:
    assert (
        run_cached([program, "/tmp/1"], key_arguments=["text"]).stdout
        == run_cached([program, "/tmp/2"], key_arguments=["text"]).stdout
        == "/tmp/1\n"
    )
    assert run_cached([program, "/tmp/1"], key_arguments=["other"]).stdout == "/tmp/1\n" and num_runs(program) == 2


def test_that_a_program_was_killed_is_no_answer(tmp_path: Path, place: Path) -> None:
    path = tmp_path / "killed"
    path.write_text("#!/bin/sh\nkill -9 $$\n")
    path.chmod(0o755)
    assert run_cached([str(path)]).returncode == -9 and not place.exists()


@pytest.mark.parametrize("found", [b"", b"no gzip", b"\x1f\x8b"])
def test_an_unreadable_cache_entry_is_computed_again(program: str, place: Path, found: bytes) -> None:
    run_cached([program])
    (file,) = place.iterdir()
    file.write_bytes(found)
    assert run_cached([program]).returncode == 3 and num_runs(program) == 2
    assert run_cached([program]).returncode == 3 and num_runs(program) == 2
