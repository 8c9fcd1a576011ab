"""Create a directory atomically, once per machine.

A lock file keeps a second process from doing the same work. The final rename hides a half-written directory even if the
process that writes it is killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`; if it does not exist, fill a temporary directory with `build` and rename it to `target`."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            build(temporary)
            temporary.chmod(0o755)
            os.rename(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


class ProgressLine:
    """Progress line on standard error: rewritten in place on a terminal, else printed once per stage.

    The stage is the first word of the text."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._is_terminal = sys.stderr.isatty()
        self._last = ""

    def __call__(self, text: str) -> None:
        stage = text.split(" ", 1)[0]
        if self._is_terminal:
            sys.stderr.write(f"\r\x1b[K{self._title}: {text}")
        elif stage != self._last:
            sys.stderr.write(f"{self._title}: {text}\n")
        self._last = stage
        sys.stderr.flush()

    def close(self) -> None:
        if self._is_terminal:
            sys.stderr.write("\n")
