"""Test that a lower priority is that of one thread."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from tandem.core.thread_priority import lower_priority


@pytest.mark.skipif(sys.platform != "linux", reason="priorities are those of processes")
def test_only_the_calling_thread_gets_a_lower_priority() -> None:
    seen: list[int] = []

    def work() -> None:
        lower_priority()
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [max(before, 5)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
