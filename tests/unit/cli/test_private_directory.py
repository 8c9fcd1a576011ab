"""Test that the directory for temporary files is the user's alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.cli.private_directory import private_directory, secret_file
from tandem.core.errors import TandemError


def test_it_is_made_once_for_its_user_alone(tmp_path: Path) -> None:
    made = private_directory(tmp_path)
    assert made.stat().st_mode & 0o777 == 0o700 and made.name == f"tandem-{os.getuid()}"
    (made / "ray").mkdir()
    assert private_directory(tmp_path) == made and (made / "ray").is_dir()


@pytest.mark.parametrize("kind", ["open", "file", "link"])
def test_a_name_that_others_may_have_taken_is_refused(tmp_path: Path, kind: str) -> None:
    taken = tmp_path / f"tandem-{os.getuid()}"
    if kind == "open":
        taken.mkdir()
        taken.chmod(0o777)
    elif kind == "file":
        taken.touch(0o600)
    else:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(0o700)
        taken.symlink_to(elsewhere)
    with pytest.raises(TandemError, match="0700"):
        private_directory(tmp_path)


def test_a_secret_is_written_once(tmp_path: Path) -> None:
    file = secret_file(tmp_path / "token")
    secret = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600 and len(secret) == 64
    assert secret_file(file).read_text() == secret and list(tmp_path.iterdir()) == [file]
