"""Programs that pip does not have and .ci/system installs; a test that drives one asks here."""

from __future__ import annotations

import shutil

import pytest


def program(name: str) -> str:
    """Its path; skips the test where it is not installed. In CI .ci/system has failed before."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make system")
    return found
