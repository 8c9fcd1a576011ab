"""A file per running worker by which a program beside it finds it, and the reading of them; never asks a worker.

A worker that was killed leaves its file behind, so one says who may run and never who does.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from urllib.parse import quote

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import Incarnation, WorkerId, WorkerRef

_SUFFIX = ".worker"
_log = logging.getLogger(__name__)


class RunFile:
    """Of one life of one worker, in `directory`, which only its owner may enter."""

    def __init__(self, directory: Path, me: WorkerRef) -> None:
        self._me = me
        self._path = directory / f"{quote(me.id, safe='')}{_SUFFIX}"

    def __repr__(self) -> str:
        return f"<run file {self._path}>"

    def write(self) -> None:
        """Whole or not at all. Raises TandemError."""
        unfinished = self._path.with_suffix(".new")
        said = {"id": self._me.id, "incarnation": self._me.incarnation, "address": self._me.address}
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(said))
            unfinished.replace(self._path)
        except OSError as error:
            message = f"{self._path} cannot be written: {error}"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="worker.run_dir") from error

    def remove(self) -> None:
        """Unless a later life has put its own there. Never raises."""
        try:
            if _read(self._path) == self._me:
                self._path.unlink()
        except (OSError, ValueError) as error:
            _log.debug("%s is not removed: %s", self._path, error)


def read_run_files(directory: Path) -> tuple[WorkerRef, ...]:
    """Workers that said they ran, by id; none where the directory is not there. A file that cannot be read is logged
    and left out."""
    found = []
    for path in directory.glob(f"*{_SUFFIX}"):
        try:
            found.append(_read(path))
        except (OSError, ValueError) as error:
            _log.warning("%s is left out: %s", path, error)
    return tuple(sorted(found))


def _read(path: Path) -> WorkerRef:
    """OSError, ValueError: there is none, or it is no such file."""
    said = json.loads(path.read_text())
    match said:
        case {"id": str(worker), "incarnation": int(incarnation), "address": str(address)}:
            return WorkerRef(WorkerId(worker), Incarnation(incarnation), address)
        case _:
            raise ValueError(f"not the file of a worker: {said!r}")
