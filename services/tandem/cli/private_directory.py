"""Make a directory for temporary files that other users of this machine cannot enter."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from tandem.core.errors import ErrorKind, TandemError


def private_directory(parent: Path) -> Path:
    """Return the directory `tandem-<user id>` in `parent`, which is made with mode 0700 unless it exists.

    `parent` may be writable for everybody, as /tmp is. Raises TandemError(INVALID_REQUEST) where the name is taken by
    something that others own or can enter."""
    path = parent / f"tandem-{os.getuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        message = (
            f"{path} must be a directory of this user with mode 0700; remove it, or set TMPDIR to another directory"
        )
        raise TandemError(ErrorKind.INVALID_REQUEST, message)
    return path
