"""What a program said of its input, kept on disk until the program or the input changes; never says more than it did.

Helm takes a tenth of a second for each rendering, and all test runs ask it the same. What is kept lies in a folder that
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
"""After so long without use an answer is removed."""


class Said(NamedTuple):
    """What a program wrote, and the code with which it ended."""

    returncode: int
    stdout: str
    stderr: str


def ask(
    command: Sequence[str],
    *,
    reads: Iterable[Path] = (),
    values: str = "",
    cwd: Path | None = None,
    told: Sequence[str] | None = None,
) -> Said:
    """Run `command` with `values` as its standard input, or return what it said when it was run like that before.

    `reads` are the files and folders that decide on the answer. `told` stands for the arguments where these name
    temporary files: their contents.
    """
    program, *arguments = command
    parts = [_identity(program), *(told or arguments), "", values, *map(digest_of, reads)]
    kept = PLACE / hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    found = _read(kept)
    if found is None:
        done = subprocess.run(command, input=values, capture_output=True, text=True, check=False, timeout=120, cwd=cwd)
        found = Said(done.returncode, done.stdout, done.stderr)
        # One that was killed gave no answer. Where nothing can be written it is asked every time.
        if found.returncode >= 0:
            with suppress(OSError):
                _write(kept, found)
    return found


@functools.cache
def digest_of(place: Path) -> str:
    """Of a file, or of the names and contents of all files below a folder, also of those that links lead to."""
    if place.is_file():
        return hashlib.sha256(place.read_bytes()).hexdigest()
    files = [Path(folder) / name for folder, _, names in os.walk(place, followlinks=True) for name in names]
    told = [(str(file.relative_to(place)), hashlib.sha256(file.read_bytes()).hexdigest()) for file in sorted(files)]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


@functools.cache
def _identity(program: str) -> str:
    """Changes with another version of the program."""
    stat = Path(program).resolve().stat()
    return f"{Path(program).name} {stat.st_size} {stat.st_mtime_ns}"


def _read(kept: Path) -> Said | None:
    try:
        found = Said(*json.loads(gzip.decompress(kept.read_bytes())))
        os.utime(kept)
    except (OSError, ValueError, TypeError, EOFError):
        return None
    return found


def _write(kept: Path, found: Said) -> None:
    """Other processes see all of it or nothing."""
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
