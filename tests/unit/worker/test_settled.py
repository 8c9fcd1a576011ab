"""Test that the garbage collector skips the objects that exist when a worker begins to serve, and only those."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tandem.worker.main import settle_process


class _Ring:
    """Refer to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Freeze the process's earlier objects, so that they cost the test's collections no time."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_garbage_goes_before_the_rest_is_frozen_and_later_garbage_after() -> None:
    before = weakref.ref(_Ring())
    kept = _Ring()
    settle_process()
    assert before() is None
    assert not any(found is kept for found in gc.get_objects())
    after = weakref.ref(_Ring())
    gc.collect()
    assert after() is None
