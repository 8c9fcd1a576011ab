"""When Redis counts as up: each command is its own witness, for as long as it is asked for."""

from __future__ import annotations

import logging

import pytest

from tandem.stores.redis_health import SILENT_S, RedisHealth


class HandClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


def test_reads_that_are_answered_say_nothing_of_writes() -> None:
    health = RedisHealth(HandClock())
    health.failed("index", "XADD", OSError("read only"))
    health.answered("index", "XREAD")
    assert not health.is_up and health.problem == "OSError: read only"
    health.answered("index", "XADD")
    assert health.is_up and health.problem is None


def test_a_command_that_nobody_asks_for_any_more_does_not_count_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    health = RedisHealth(clock)
    health.failed("index", "SET", OSError("gone"))
    clock.time += SILENT_S - 1
    health.failed("index", "SET", OSError("still gone"))
    clock.time += SILENT_S - 1
    health.answered("registry", "PEXPIRE")
    assert not health.is_up and health.problem == "OSError: gone", "what failed first"
    clock.time += 2
    assert not health.is_up, "only an answer shows that Redis is there"
    with caplog.at_level(logging.INFO):
        health.answered("registry", "PEXPIRE")
    assert health.is_up and health.num_errors["index"] == 2
    assert [record.message for record in caplog.records][-1] == "Redis answers again"
