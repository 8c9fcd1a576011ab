"""Test parsing the secret file, and following its changes while a program runs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.wire.secret_file import LOOK_S, SecretFile, parse_secrets

OLD, NEW = b"o" * 64, b"n" * 64


def write(path: Path, *lines: bytes) -> Path:
    """Replace the file by another one of its name, as Kubernetes does with a mounted Secret."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(b"\n".join(lines) + b"\n")
    fresh.replace(path)
    return path


@pytest.mark.parametrize(
    ("content", "secrets"),
    [
        (OLD, (OLD,)),
        (OLD + b"\n", (OLD,)),
        (b"\r\n  " + NEW + b" \r\n\n" + OLD + b"\n", (NEW, OLD)),
        (bytes(range(0x80, 0xA0)), (bytes(range(0x80, 0xA0)),)),
    ],
)
def test_one_or_two_lines_are_secrets(content: bytes, secrets: tuple[bytes, ...]) -> None:
    assert parse_secrets(content, "file") == secrets


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds 0 secrets"),
        (b"\n\n", "holds 0 secrets"),
        (b"\n".join([OLD] * 3), "holds 3 secrets"),
        (b"x" * 31, "less than 32 bytes"),
        (OLD + b"\nhunter2\n", "less than 32 bytes"),
    ],
)
def test_other_files_are_refused_without_quoting_their_content(content: bytes, message: str) -> None:
    with pytest.raises(TandemError, match=message) as caught:
        parse_secrets(content, "/run/secret")
    assert caught.value.kind is ErrorKind.INVALID_REQUEST and caught.value.param == "cluster.secret_file"
    assert "hunter2" not in caught.value.message and "/run/secret" in caught.value.message


def test_a_missing_file_or_a_directory_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(TandemError, match=r"cannot read .*") as caught:
            SecretFile(path)
        assert str(path) in caught.value.message


def test_a_change_is_seen_within_a_second(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "secret", OLD)
    secrets = SecretFile(path)
    assert secrets.current(100.0) == (OLD,)
    write(path, NEW, OLD)
    assert secrets.current(100.0 + LOOK_S / 2) == (OLD,)
    assert secrets.current(100.0 + LOOK_S) == (NEW, OLD)
    write(path, NEW)
    assert secrets.current(50.0) == (NEW,), "the clock was set back"
    assert "2 secrets" in caplog.text
    assert (OLD + NEW).decode() not in caplog.text and NEW.decode() not in caplog.text


@pytest.mark.parametrize("content", [None, b"", b"short\n"])
def test_an_unusable_file_leaves_the_secrets_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    path = write(tmp_path / "secret", OLD)
    secrets = SecretFile(path)
    if content is None:
        path.unlink()
    else:
        write(path, content)
    for second in range(5):
        assert secrets.current(100.0 + second) == (OLD,)
    assert caplog.text.count("the previous secrets stay in force") == 1
    write(path, NEW)
    assert secrets.current(200.0) == (NEW,)
