"""Read the cluster's secrets from their file, and read it again when it changes.

The file holds one secret per line, in one line or two: the first is used to sign, each is accepted. So a rotation takes
two changes of the file: add the new secret as the second line, then, after all programs have read it, swap the lines.
The file is opened by its path each time, because Kubernetes replaces the whole directory of a mounted Secret.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tandem.core.errors import ErrorKind, TandemError

MIN_SECRET_BYTES = 32
MAX_SECRETS = 2
LOOK_S = 1.0
"""Minimum seconds between two checks whether the file has changed."""

_MAX_FILE_BYTES = 64 << 10
_log = logging.getLogger(__name__)
Signature = tuple[int, ...]


def parse_secrets(content: bytes, name: str) -> tuple[bytes, ...]:
    """Return the secrets in the content of a secret file: its lines that are not blank, without white space around
    them.

    `name`: name of the file for error messages. Raises TandemError(INVALID_REQUEST) where there is no secret, there are
    more than MAX_SECRETS, or one has less than MIN_SECRET_BYTES bytes; the message contains no secret.
    """
    found = tuple(line.strip() for line in content.splitlines() if line.strip())
    if not 1 <= len(found) <= MAX_SECRETS:
        raise _refuse(f"{name} holds {len(found)} secrets: write one per line, one line or two")
    if any(len(secret) < MIN_SECRET_BYTES for secret in found):
        raise _refuse(f"{name} has a line of less than {MIN_SECRET_BYTES} bytes: `openssl rand -hex 32` makes a secret")
    return found


def signature(*paths: Path) -> Signature:
    """Return a value that changes when one of the files at `paths` is replaced or its content changes. The value is ()
    where a file is missing."""
    try:
        stats = [path.stat() for path in paths]
    except OSError:
        return ()
    return tuple(n for s in stats for n in (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))


class SecretFile:
    """Hold the cluster's secrets, and read them again when their file changes.

    If the changed file cannot be used, the problem is logged and the secrets stay as they were.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. Raises TandemError(INVALID_REQUEST) where it cannot be used."""
        self._path = path
        self._seen = signature(path)
        self._secrets = self._read()
        self._looked_at: float | None = None

    def current(self, now: float) -> tuple[bytes, ...]:
        """Return the secrets: the first is used for signing, and each of them is accepted. Checks the file for changes
        before, but at most every `LOOK_S` seconds.

        `now`: the current time in seconds, by the same clock in all calls.
        """
        # The clock may have been set back, which must not delay a rotation: hence the lower bound.
        if self._looked_at is None or not 0 <= now - self._looked_at < LOOK_S:
            self._looked_at = now
            self.look()
        return self._secrets

    def look(self) -> bool:
        """Check the file for changes at once, and return whether the secrets have changed.

        Call it when a signature matches none of the secrets, because the sender may have read a changed file before
        this program.
        """
        before = self._secrets
        seen = signature(self._path)
        if seen == self._seen:
            return False
        self._seen = seen  # taken before reading, so that a change during the read is seen by the next check
        try:
            self._secrets = self._read()
        except TandemError as error:
            _log.error("the secret file is unusable, and the previous secrets stay in force: %s", error.message)
        else:
            _log.info("%d secrets were read again from %s", len(self._secrets), self._path)
        return self._secrets != before

    def _read(self) -> tuple[bytes, ...]:
        try:
            with self._path.open("rb") as file:
                content = file.read(_MAX_FILE_BYTES)
        except OSError as error:
            raise _refuse(f"cannot read {self._path}: {error.strerror}") from None
        return parse_secrets(content, str(self._path))


def _refuse(message: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, f"cluster.secret_file: {message}", param="cluster.secret_file")
