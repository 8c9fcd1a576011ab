"""Programs that tests drive; a test that drives one asks here."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest


def program(name: str) -> str:
    """The path of one that pip does not have and .ci/system installs; skips the test where it is not installed. In CI
    .ci/system has failed before."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make system")
    return found


def installed_program(name: str) -> str:
    """The path of one that pip installs beside the interpreter."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        pytest.skip(f"{name} is not installed: make setup")
    return str(path)
