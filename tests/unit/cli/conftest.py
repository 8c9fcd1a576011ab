"""Fixtures for tests of the command: an environment without settings, and logging that is restored afterwards."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Restore logging, which a command that runs in this process sets up for the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
