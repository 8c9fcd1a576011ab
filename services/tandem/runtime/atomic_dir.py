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
    """Return the directory `target`; if it does not exist, create it with `build`.

    `build` fills a temporary directory, which is then renamed to `target`. Blocks while another process builds the same
    directory. If `build` raises, the temporary directory is removed and `target` still does not exist."""
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
    """Progress display on standard error: call it with each new text, and `close` it at the end.

    On a terminal the line is rewritten in place. Elsewhere a text is printed only if its first word, the stage, differs
    from the previous text's first word."""

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
