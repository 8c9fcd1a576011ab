"""Create a directory atomically, once per machine.

A lock file keeps a second process from doing the same work. The final rename hides a half-written directory even if the
process that writes it is killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
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
