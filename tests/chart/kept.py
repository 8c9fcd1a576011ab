"""Cache the output of programs on disk until the program or its input changes.

Helm takes a tenth of a second for each rendering, and all test runs render the same values. The cache is a folder that
git ignores; several test processes may read and write it at once.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

PLACE = Path(__file__).resolve().parents[2] / ".pytest_cache" / "programs"
KEEP_S = 7 * 86_400
"""An entry that was not read for this long is removed."""


class ProgramOutput(NamedTuple):
    """Exit status and output of a program."""

    returncode: int
    stdout: str
    stderr: str


def run_cached(
    command: Sequence[str],
    *,
    reads: Iterable[Path] = (),
    values: str = "",
    cwd: Path | None = None,
    key_arguments: Sequence[str] | None = None,
) -> ProgramOutput:
    """Run `command` with `values` as its standard input, or return the cached output of an equal earlier run.

    `reads` are the files and folders that the output depends on. `key_arguments` replaces the arguments in the cache
    key where they name temporary files: their contents."""
    program, *arguments = command
    parts = [_identity(program), *(key_arguments or arguments), "", values, *map(digest_of, reads)]
    kept = PLACE / hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    found = _read(kept)
    if found is None:
        done = subprocess.run(command, input=values, capture_output=True, text=True, check=False, timeout=120, cwd=cwd)
        found = ProgramOutput(done.returncode, done.stdout, done.stderr)
        # A killed program gave no output to cache. Where nothing can be written, the command runs every time.
        if found.returncode >= 0:
            with suppress(OSError):
                _write(kept, found)
    return found


@functools.cache
def digest_of(place: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all files below a folder; links are followed."""
    if place.is_file():
        return hashlib.sha256(place.read_bytes()).hexdigest()
    files = [Path(folder) / name for folder, _, names in os.walk(place, followlinks=True) for name in names]
    entries = [(str(file.relative_to(place)), hashlib.sha256(file.read_bytes()).hexdigest()) for file in sorted(files)]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


@functools.cache
def _identity(program: str) -> str:
    """Return a text that differs between versions of the program."""
    stat = Path(program).resolve().stat()
    return f"{Path(program).name} {stat.st_size} {stat.st_mtime_ns}"


def _read(kept: Path) -> ProgramOutput | None:
    try:
        found = ProgramOutput(*json.loads(gzip.decompress(kept.read_bytes())))
        os.utime(kept)
    except (OSError, ValueError, TypeError, EOFError):
        return None
    return found


def _write(kept: Path, found: ProgramOutput) -> None:
    """Write an entry atomically: other processes see all of it or nothing."""
    PLACE.mkdir(parents=True, exist_ok=True)
    _remove_old()
    with NamedTemporaryFile(dir=PLACE, delete=False) as file:
        file.write(gzip.compress(json.dumps(found).encode(), 1))
    os.replace(file.name, kept)


@functools.cache
def _remove_old() -> None:
    for file in PLACE.iterdir():
        try:
            if time.time() - file.stat().st_mtime > KEEP_S:
                file.unlink()
        except OSError:
            # Another process was faster.
            continue
