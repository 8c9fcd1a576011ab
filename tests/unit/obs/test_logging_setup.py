"""Test that a program logs by its settings, and everything in one format."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.core.config import TelemetryConfig
from tandem.obs.logs.log_rate_limit import PER_MESSAGE
from tandem.obs.logs.logging_setup import NOISY, set_up_logging
from tandem.obs.metrics.instruments import LOG_LINES_DROPPED
from tandem.obs.telemetry import Telemetry


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, hook = list(root.handlers), root.level, sys.excepthook
    noisy = {name: logging.getLogger(name).level for name in NOISY}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.excepthook = hook
    logging.captureWarnings(False)
    for name, before in noisy.items():
        logging.getLogger(name).setLevel(before)


def set_up(**telemetry: Any) -> io.StringIO:
    stream = io.StringIO()
    set_up_logging(TelemetryConfig(**telemetry), "tandem-test", "t-1", [logging.StreamHandler(stream)])
    return stream


def test_the_level_is_the_configured_one() -> None:
    stream = set_up(log_level="warning")
    logging.getLogger("tandem.test").info("little")
    logging.getLogger("tandem.test").warning("much")
    logging.getLogger("grpc").info("noise")
    assert [line.split(" ", 2)[2] for line in stream.getvalue().splitlines()] == ["WARNING tandem.test much"]
    stream = set_up(log_level="debug")
    logging.getLogger("tandem.test").debug("least")
    logging.getLogger("grpc").info("noise")
    assert stream.getvalue().endswith(" DEBUG tandem.test least\n")
    stream = set_up(log_level="error")
    logging.getLogger("grpc").warning("noise")
    assert stream.getvalue() == ""


def test_json_names_the_process() -> None:
    stream = set_up(log_format="json")
    logging.getLogger("tandem.test").info("one")
    parsed = json.loads(stream.getvalue())
    assert (parsed["service"], parsed["instance"], parsed["pid"]) == ("tandem-test", "t-1", os.getpid())
    stream = io.StringIO()
    set_up_logging(TelemetryConfig(log_format="json"), "tandem-test", "", [logging.StreamHandler(stream)])
    logging.getLogger("tandem.test").info("two")
    assert json.loads(stream.getvalue())["instance"] == f"{socket.gethostname()}-{os.getpid()}"


def test_lines_that_are_left_out_are_counted() -> None:
    telemetry = Telemetry.start("tandem-test", "t-1", 10)
    set_up()
    for _ in range(int(PER_MESSAGE.burst) + 7):
        logging.getLogger("tandem.test").info("the same")
    (points,) = [each.points for each in telemetry.metrics.collect() if each.instrument is LOG_LINES_DROPPED]
    assert points == {(): 7}


def test_a_warning_is_a_line_of_json() -> None:
    stream = set_up(log_format="json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old\nways", stacklevel=1)
    parsed = json.loads(stream.getvalue())
    assert parsed["severity"] == "WARNING" and "old\nways" in parsed["message"]


PROGRAM = """
import logging, sys, threading
from tandem.core.config import TelemetryConfig
from tandem.obs.logs.logging_setup import set_up_logging

set_up_logging(TelemetryConfig(log_format="json"), "tandem-test")
for _ in range(30):
    logging.getLogger("tandem.test").info("the same")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("nobody\\ncatches this")
"""


def test_every_line_of_a_program_on_stderr_is_json() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    parsed = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["message"] for line in parsed[: int(PER_MESSAGE.burst)]] == ["the same"] * int(PER_MESSAGE.burst)
    critical = [line for line in parsed if line["severity"] == "CRITICAL"]
    assert ["ZeroDivisionError" in critical[0]["exception"], "nobody\ncatches" in critical[1]["exception"]] == [
        True
    ] * 2
    assert parsed[-1]["message"] == "10 lines like this one were left out: the same"
