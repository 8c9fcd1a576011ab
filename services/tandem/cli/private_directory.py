"""Make a directory and a secret for the programs of one user of this machine, which other users cannot read."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from tandem.core.errors import ErrorKind, TandemError

SECRET_BYTES = 32


def private_directory(parent: Path) -> Path:
    """Return the directory `tandem-<user id>` in `parent`; it is created with mode 0700 if it does not exist.

    `parent` may be writable for everybody, as /tmp is. Raises TandemError(INVALID_REQUEST) if the path exists and is
    not a directory of this user, or if others have access to it."""
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


def secret_file(path: Path) -> Path:
    """Write a new secret to the file `path` with mode 0600, unless the file exists, and return `path`.

    If several processes call this at once, all find the same secret."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(SECRET_BYTES))
    with suppress(FileExistsError):
        path.hardlink_to(new)
    new.unlink()
    return path
