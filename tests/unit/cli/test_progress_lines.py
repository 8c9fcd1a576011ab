"""Test that a step which takes long is reported again, on a terminal and in a log."""

from __future__ import annotations

import subprocess
import sys
from contextlib import redirect_stderr
from io import StringIO

import pytest

from tandem.cli import progress_lines
from tandem.cli.progress_lines import CHANGE_S, SILENCE_S, ProgressLines
from tests.unit.cli.doubles import Hands, Terminal


def test_each_step_is_a_line_with_the_seconds_since_the_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Hands()
    lines = ProgressLines(clock)
    lines.step("redis", "starting a server")
    clock.time += 61.25
    lines.step("ready", "")
    assert capsys.readouterr().err == "    0.0 s  redis    starting a server\n   61.2 s  ready\n"


def test_a_silent_step_is_reported_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Hands()
    lines = ProgressLines(clock)
    lines.step("ray", "starting")
    clock.time = SILENCE_S - 0.1
    lines.report()
    clock.time = SILENCE_S
    lines.report()
    lines.report()
    assert capsys.readouterr().err.splitlines()[1:] == ["    5.0 s  ray      still starting"]


def test_a_detail_is_reported_when_it_changes_but_not_too_often(capsys: pytest.CaptureFixture[str]) -> None:
    clock, detail = Hands(), [""]
    lines = ProgressLines(clock)
    lines.step("workers", "starting 2", lambda: detail[0])
    for clock.time, detail[0] in (
        (CHANGE_S, "loading"),
        (1.5, "calibrating"),
        (CHANGE_S * 2, "calibrating"),
        (3.5, ""),
    ):
        lines.report()
    clock.time = 2.0 + SILENCE_S
    lines.report()
    assert capsys.readouterr().err.splitlines()[1:] == [
        "    1.0 s  workers  loading",
        "    2.0 s  workers  calibrating",
        "    7.0 s  workers  still starting 2",
    ]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (Terminal(), "\r\x1b[K    1.0 s  packages 1 of 9\r\x1b[K    2.0 s  packages 2 of 9\r\x1b[K    2.0 s  import\n"),
        (StringIO(), "    2.0 s  import\n"),
    ],
)
def test_details_that_change_often_share_one_line_of_a_terminal_and_are_rare_in_a_log(
    stream: StringIO, expected: str
) -> None:
    clock, detail = Hands(), ["1 of 9"]
    with redirect_stderr(stream):
        lines = ProgressLines(clock, rewrites=True)
        lines.step("packages", "fetching", lambda: detail[0])
        for clock.time, detail[0] in ((1.0, "1 of 9"), (2.0, "2 of 9")):
            lines.report()
        lines.step("import", "")
    assert stream.getvalue().partition("\n")[2] == expected


def test_the_thread_reports_until_the_block_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_lines, "TICK_S", 0.001)
    clock = Hands()
    with ProgressLines(clock) as lines:
        lines.step("ray", "starting")
        err = ""
        while "still starting" not in err:
            clock.time += SILENCE_S  # once more, because what is written while `readouterr` empties its buffer is lost
            err += capsys.readouterr().err
    clock.time *= 2
    assert capsys.readouterr().err == ""


def test_the_file_runs_without_installed_packages() -> None:
    """The set-up uses it before there are any."""
    command = [sys.executable, "-I", "-S", str(progress_lines.__file__)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
