"""Test the rate limit of log lines: which lines are dropped, which never are, and that drops are reported."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from tandem.obs.logs.log_rate_limit import ERRORS, MAX_BUCKETS, PER_MESSAGE, UNLIMITED, LogLimit

BURST = int(PER_MESSAGE.burst)


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class Log:
    """A logger of its own with two handlers behind one limit."""

    def __init__(self) -> None:
        self.clock = Hands()
        self.handlers = (Kept(), Kept())
        self.limit = LogLimit(self.clock, self.handlers)
        self.logger = logging.getLogger("tandem.test.limit")
        self.logger.propagate = False
        self.logger.setLevel(logging.DEBUG)
        self.logger.handlers[:] = self.handlers
        for handler in self.handlers:
            handler.addFilter(self.limit)

    def take(self) -> list[str]:
        """What was written since the last time, to both handlers alike."""
        written = [list(handler.messages) for handler in self.handlers]
        assert written[0] == written[1]
        for handler in self.handlers:
            handler.messages.clear()
        return written[0]


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.logger.handlers.clear()
    made.logger.propagate = True


def test_lines_of_one_place_have_a_burst_and_then_a_pace(log: Log) -> None:
    for number in range(BURST + 5):
        log.logger.warning("worker %d is slow", number)
    assert log.take() == [f"worker {number} is slow" for number in range(BURST)]
    assert log.limit.num_dropped == 5
    log.clock.at += 2 / PER_MESSAGE.per_s
    for number in range(4):
        log.logger.warning("worker %d is slow", number)
    summary = f"5 lines like this one were left out: worker {BURST} is slow"
    assert log.take() == [summary, "worker 0 is slow", "worker 1 is slow"]
    assert log.limit.num_dropped == 7


def test_another_place_or_level_or_logger_is_another_kind(log: Log) -> None:
    for number in range(BURST + 1):
        log.logger.info("a %d", number)
    log.take()
    log.logger.info("b %d", 1)
    log.logger.warning("a %d", 1)
    assert log.take() == ["b 1", "a 1"]


def test_errors_share_a_limit_only_with_the_same_message(log: Log) -> None:
    for number in range(BURST + 5):
        log.logger.error("%s", f"failure {number}")
    assert len(log.take()) == BURST + 5
    for error in (ValueError("a"), KeyError("a"), ValueError("b")):
        for _ in range(BURST):
            log.logger.error("it failed", exc_info=error)
    assert len(log.take()) == 3 * BURST
    log.logger.error("it failed", exc_info=ValueError("a"))
    assert log.take() == []


def test_all_errors_of_a_logger_have_a_wide_limit(log: Log) -> None:
    for number in range(int(ERRORS.burst) + 5):
        log.logger.error("request %d failed", number)
    assert len(log.take()) == ERRORS.burst
    assert log.limit.num_dropped == 5


def test_lines_marked_unlimited_are_never_dropped(log: Log) -> None:
    for _ in range(BURST + 5):
        log.logger.info("request %s", "finished", extra={UNLIMITED: True})
    assert log.take() == ["request finished"] * (BURST + 5)
    assert log.limit.num_dropped == 0


def test_the_summary_of_a_flood_is_written_with_the_next_line_or_at_close(log: Log) -> None:
    for _ in range(BURST + 3):
        log.logger.info("the same")
    log.take()
    log.clock.at += 60
    log.logger.info("another")
    assert log.take() == ["3 lines like this one were left out: the same", "another"]
    for _ in range(BURST + 2):
        log.logger.info("the same")
    log.take()
    log.limit.flush()
    log.limit.flush()
    assert log.take() == ["2 lines like this one were left out: the same"]


def test_kinds_are_bounded(log: Log) -> None:
    for number in range(MAX_BUCKETS * 3):
        log.logger.info(f"f-string {number}")
    assert len(log.take()) == MAX_BUCKETS * 3
    for _ in range(BURST + 1):
        log.logger.info("the same")
    assert len(log.take()) == BURST
    assert len(log.limit._buckets) <= MAX_BUCKETS


def test_threads_share_a_limit(log: Log) -> None:
    def flood() -> None:
        for _ in range(200):
            log.logger.info("the same")

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log.take()) == BURST and log.limit.num_dropped == 800 - BURST
