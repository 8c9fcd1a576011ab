"""Test that the bar shows progress, and leaves a terminal's line empty at the end."""

from __future__ import annotations

from contextlib import redirect_stderr

import pytest

from tandem.cli.progress_bar import EVERY_LOGGED_S, EVERY_S, ProgressBar
from tests.unit.cli.doubles import Hands, Terminal


def test_a_log_gets_a_line_each_half_minute_and_a_short_run_none(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Hands()
    with ProgressBar(clock, 10) as bar:
        bar.update(3, lambda: pytest.fail("nobody reads it"))
        clock.time += EVERY_LOGGED_S
        bar.update(5, lambda: "half")
        bar.update(6, lambda: pytest.fail("too soon"))
    assert capsys.readouterr().err == f"  [{'#' * 12}{'.' * 12}] 5 of 10  half\n"


def test_the_bar_shows_the_fraction_and_the_text() -> None:
    clock, terminal = Hands(), Terminal()
    with redirect_stderr(terminal), ProgressBar(clock, 1000) as bar:
        bar.update(250, lambda: "one")
        bar.update(300, lambda: pytest.fail("too soon to be seen"))
        clock.time += EVERY_S
        bar.update(2000, lambda: "beyond")
    written = terminal.getvalue()
    assert "[######..................] 250 of 1,000  one" in written
    assert f"[{'#' * 24}] 2,000 of 1,000  beyond" in written
    assert written.endswith("\r\x1b[K"), "the line is left empty"


def test_without_a_known_end_the_bar_counts_and_an_interrupt_clears_it() -> None:
    terminal = Terminal()
    with pytest.raises(KeyboardInterrupt), redirect_stderr(terminal), ProgressBar(Hands(), None, "tried") as bar:
        bar.update(7, lambda: "running")
        raise KeyboardInterrupt
    written = terminal.getvalue()
    assert "  7 tried  running" in written and written.endswith("\r\x1b[K")
