"""The cluster's secrets as their file has them now; never signs anything and never writes the file.

The file holds one secret per line, one line or two: the first signs, each is accepted. So a rotation is two changes of
the file, a new second line and then the two lines swapped, with as much time between them as the files of all
programs take to follow. The file is looked for by its name, because a mounted Secret is swapped as a whole directory.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tandem.core.errors import ErrorKind, TandemError

MIN_SECRET_BYTES = 32
MAX_SECRETS = 2
LOOK_S = 1.0
"""Between two looks at the file while secrets are asked for."""

_MAX_FILE_BYTES = 64 << 10
_log = logging.getLogger(__name__)
Signature = tuple[int, ...]


def parse_secrets(content: bytes, name: str) -> tuple[bytes, ...]:
    """The lines of a file without white space around them. Raises TandemError(INVALID_REQUEST), which tells none."""
    found = tuple(line.strip() for line in content.splitlines() if line.strip())
    if not 1 <= len(found) <= MAX_SECRETS:
        raise _refuse(f"{name} holds {len(found)} secrets: write one per line, one line or two")
    if any(len(secret) < MIN_SECRET_BYTES for secret in found):
        raise _refuse(f"{name} has a line of less than {MIN_SECRET_BYTES} bytes: `openssl rand -hex 32` makes a secret")
    return found


def signature(*paths: Path) -> Signature:
    """Changes when a name stands for another file, or the file for another content; empty where one is missing."""
    try:
        stats = [path.stat() for path in paths]
    except OSError:
        return ()
    return tuple(n for s in stats for n in (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))


class SecretFile:
    """Seconds are those of any one clock. A file that cannot be taken leaves the secrets as they were."""

    def __init__(self, path: Path) -> None:
        """Raises TandemError(INVALID_REQUEST) for a file that holds no secret."""
        self._path = path
        self._seen = signature(path)
        self._secrets = self._read()
        self._looked_at: float | None = None

    def __repr__(self) -> str:
        return f"<secrets of {self._path}, {len(self._secrets)}>"

    def current(self, now: float) -> tuple[bytes, ...]:
        """The first signs, each is accepted."""
        # A clock that was set back must not keep a rotation from being seen.
        if self._looked_at is None or not 0 <= now - self._looked_at < LOOK_S:
            self._looked_at = now
            self._look()
        return self._secrets

    def look(self) -> bool:
        """Whether there are other secrets now. To be asked about what none of the current ones explains: somebody else
        may have seen a change of the file sooner."""
        before = self._secrets
        self._look()
        return self._secrets != before

    def _look(self) -> None:
        seen = signature(self._path)
        if seen == self._seen:
            return
        self._seen = seen  # of before it was read: what is written meanwhile is seen at the next look
        try:
            self._secrets = self._read()
        except TandemError as error:
            _log.error("the secret file is not taken, the last secrets go on to hold: %s", error.message)
        else:
            _log.info("%s was read again: %d secrets", self._path, len(self._secrets))

    def _read(self) -> tuple[bytes, ...]:
        try:
            with self._path.open("rb") as file:
                content = file.read(_MAX_FILE_BYTES)
        except OSError as error:
            raise _refuse(f"cannot read {self._path}: {error.strerror}") from None
        return parse_secrets(content, str(self._path))


def _refuse(message: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, f"cluster.secret_file: {message}", param="cluster.secret_file")
