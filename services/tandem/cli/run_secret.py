"""Make the cluster secret of one `tandem serve` run, in a file that only its owner can read.

The secret is not passed as an argument or environment variable, where other users could see it.
"""

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
    """Create the secret file in a directory of its own, and remove both at the end."""
    with tempfile.TemporaryDirectory(prefix="tandem-serve-") as directory:
        path = Path(directory) / "secret"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
        yield path
