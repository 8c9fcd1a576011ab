"""Write and read run files, by which other programs on a machine find the workers that have ranks on it.

A killed worker leaves its run file behind, so the worker that a run file names may have ended.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from urllib.parse import quote

import msgspec

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import WorkerRef

_SUFFIX = ".worker"
_log = logging.getLogger(__name__)


class RunFile:
    """Write and remove the run file of one incarnation of a worker, `me`, in `directory`, which is created with mode
    0700."""

    def __init__(self, directory: Path, me: WorkerRef) -> None:
        self._me = me
        self._path = directory / f"{quote(me.id, safe='')}{_SUFFIX}"

    def __repr__(self) -> str:
        return f"<run file {self._path}>"

    def write(self) -> None:
        """Write the file atomically, and create the directory if needed. Raises TandemError when the file cannot be
        written."""
        unfinished = self._path.with_suffix(f".{os.getpid()}.new")  # ranks on one machine may write the same file
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished.write_bytes(msgspec.json.encode(self._me))
            unfinished.replace(self._path)
        except OSError as error:
            message = f"worker.run_dir: cannot write {self._path}: {error.strerror}"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="worker.run_dir") from error

    def remove(self) -> None:
        """Remove the file unless a later incarnation has replaced it. Does not raise; a failure is logged."""
        try:
            if _read(self._path) == self._me:
                self._path.unlink()
        except (OSError, msgspec.MsgspecError) as error:
            _log.debug("the run file %s cannot be removed: %s", self._path, error)


def read_run_files(directory: Path) -> tuple[WorkerRef, ...]:
    """Return the workers named by the run files in `directory`, sorted by id; empty if the directory does not exist. A
    worker may have ended since. Files that cannot be read are logged and skipped."""
    found = []
    for path in directory.glob(f"*{_SUFFIX}"):
        try:
            found.append(_read(path))
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("the run file %s is unreadable and ignored: %s", path, error)
    return tuple(sorted(found))


def _read(path: Path) -> WorkerRef:
    """Return the worker that a run file names. Raises OSError when the file cannot be read and msgspec.MsgspecError
    when it is malformed."""
    return msgspec.json.decode(path.read_bytes(), type=WorkerRef)
