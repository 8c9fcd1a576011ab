"""Test when Redis counts as up: each failed command must succeed again, or not be sent for a while."""

from __future__ import annotations

import logging

import pytest

from tandem.stores.redis_client import SILENT_S, RedisHealth


class HandClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


def test_successful_reads_do_not_resolve_failed_writes() -> None:
    health = RedisHealth(HandClock())
    health.failed("index", "XADD", OSError("read only"))
    health.answered("index", "XREAD")
    assert not health.is_up and health.problem == "OSError: read only"
    health.answered("index", "XADD")
    assert health.is_up and health.problem is None


def test_the_failure_of_a_command_that_is_not_sent_again_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    health = RedisHealth(clock)
    health.failed("index", "SET", OSError("gone"))
    clock.time += SILENT_S - 1
    health.failed("index", "SET", OSError("still gone"))
    clock.time += SILENT_S - 1
    health.answered("registry", "PEXPIRE")
    assert not health.is_up and health.problem == "OSError: gone", "what failed first"
    clock.time += 2
    assert not health.is_up, "only a successful command shows that Redis is up"
    with caplog.at_level(logging.INFO):
        health.answered("registry", "PEXPIRE")
    assert health.is_up and health.num_errors["index"] == 2
    assert [record.message for record in caplog.records][-1] == "Redis answers again"
