"""Provide a check that a test leaves no thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture
def every_thread_ends() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(30.0)
        assert not thread.is_alive(), thread
