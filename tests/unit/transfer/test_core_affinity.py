"""Test that a thread is kept off exactly one core, and only where there is another one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tandem.transfer.core_affinity import CoreAvoidance

ALL = os.sched_getaffinity(0)


@pytest.fixture
def thread() -> Iterator[int]:
    """Yield the native id of a waiting thread."""
    over = threading.Event()
    waiting = threading.Thread(target=over.wait)
    waiting.start()
    assert waiting.native_id is not None
    yield waiting.native_id
    over.set()
    waiting.join()


@pytest.fixture
def on_one_core() -> Iterator[int]:
    """Pin this thread to one core for a test."""
    core = min(ALL)
    os.sched_setaffinity(0, {core})
    yield core
    os.sched_setaffinity(0, ALL)


@pytest.mark.skipif(len(ALL) < 2, reason="needs a second core")
def test_another_thread_may_use_all_cores_but_ours(thread: int) -> None:
    CoreAvoidance().keep(thread)
    left = os.sched_getaffinity(thread)
    assert left < ALL
    assert len(left) == len(ALL) - 1
    assert os.sched_getaffinity(0) == ALL, "our own freedom is untouched"


def test_where_there_is_one_core_nothing_changes(thread: int, on_one_core: int) -> None:
    CoreAvoidance().keep(thread)
    assert os.sched_getaffinity(thread) == ALL


def test_a_thread_that_has_ended_is_no_error() -> None:
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    assert ended.native_id is not None
    CoreAvoidance().keep(ended.native_id)
