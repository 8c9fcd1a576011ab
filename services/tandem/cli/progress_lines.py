"""Show what a long start is doing, one line for each step, with the seconds since the beginning.

`.ci/set_up.py` runs this file before any package is installed, so at run time it imports the standard library only."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.core.clock import Clock

SILENCE_S = 5.0
"""Longest time without a line while a step runs."""
CHANGE_S = 1.0
"""Shortest time between two lines of a step whose detail changes."""
TICK_S = 0.25

_ERASE_LINE = "\r\x1b[K"


class ProgressLines:
    """Print one line to standard error for each step of a start: seconds since the beginning, stage, what is done.

    Inside the `with` block a thread reports a step that takes long, every `SILENCE_S` seconds and when its detail
    changes. Each report is a whole line, so that log lines between two reports do not break a line. Outside the block
    only `step` prints.

    `rewrites`: the details change often, and the program writes nothing else to standard error meanwhile. On a terminal
    the reports of a step then share one line, which is rewritten; elsewhere a changed detail is not reported."""

    def __init__(self, clock: Clock, *, rewrites: bool = False) -> None:
        self._clock = clock
        self._began = self._shown_at = clock.now()
        self._is_terminal = sys.stderr.isatty()
        self._rewrites = rewrites
        self._stage = self._doing = self._shown = ""
        self._detail: Callable[[], str] | None = None
        self._lock = threading.Lock()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> ProgressLines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()
        if self._rewrites and self._is_terminal:
            self._write(_ERASE_LINE)

    def step(self, stage: str, doing: str, detail: Callable[[], str] | None = None) -> None:
        """Print a line for the step that begins now.

        `stage`: short name of the step. `doing`: what it does. `detail`: function that returns what the step is doing
        at the moment, in a few words; empty if there is nothing to show. It is called often, on another thread."""
        with self._lock:
            self._stage, self._doing, self._detail, self._shown = stage, doing, detail, ""
            self._show(doing)

    def report(self) -> None:
        """Report the running step once more, if its detail has changed or nothing was printed for a while."""
        with self._lock:
            detail = self._detail() if self._detail is not None else ""
            text = detail or f"still {self._doing}"
            if self._rewrites and self._is_terminal:
                self._write(_ERASE_LINE + self._line(text)[: shutil.get_terminal_size().columns - 1])
                return
            has_changed = not self._rewrites and detail not in ("", self._shown)
            if self._clock.now() - self._shown_at >= (CHANGE_S if has_changed else SILENCE_S):
                self._shown = detail
                self._show(text)

    def _run(self) -> None:
        while not self._has_ended.wait(TICK_S):
            self.report()

    def _show(self, text: str) -> None:
        self._shown_at = self._clock.now()
        self._write((_ERASE_LINE if self._is_terminal else "") + self._line(text) + "\n")

    def _line(self, text: str) -> str:
        return f"  {self._clock.now() - self._began:5.1f} s  {self._stage:<8} {text}".rstrip()

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
