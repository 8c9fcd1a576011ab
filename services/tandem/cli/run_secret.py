"""The cluster's secret of one `tandem serve`, in a file that only its owner can read; never in an argument or the
environment, where other users could see it."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECRET_BYTES = 32


@contextmanager
def run_secret() -> Iterator[Path]:
    """The file, in a directory of its own; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="tandem-serve-") as directory:
        path = Path(directory) / "secret"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
        yield path
