"""Test what the newest lines of the workers' logs say about a start."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tandem.cli.worker_logs import MAX_MESSAGE, TAIL_BYTES, starting_workers
from tandem.obs.logs.log_formatters import JsonFormatter, TextFormatter

OF_SERVE = "INFO 2026-11-27 12:34:38,348 tandem-prefill_tandem-prefill xoavcaw5 -- Started initializing replica."


def line(message: str, formatter: logging.Formatter | None = None) -> str:
    record = logging.LogRecord("tandem.worker", logging.INFO, "worker.py", 1, message, None, None)
    return (formatter or TextFormatter()).format(record)


def write(logs: Path, pool: str, replica: str, *lines: str) -> None:
    name = f"replica_tandem-{pool}_tandem-{pool}_{replica}.log"
    (logs / name).write_text("".join(f"{each}\n" for each in lines))


def test_workers_without_a_log_and_without_a_line_are_starting(tmp_path: Path) -> None:
    write(tmp_path, "decode", "a", OF_SERVE)
    assert starting_workers(tmp_path, ["prefill", "decode"]) == "prefill: starting a process; decode: starting"


def test_the_newest_line_counts_and_workers_that_do_the_same_are_counted(tmp_path: Path) -> None:
    write(tmp_path, "prefill", "a", OF_SERVE, line("loading m"), line("calibrating step times"), "  a traceback")
    for replica, message in zip("abc", ("loading m", "vm-b@127.0.0.1:1 serves m; more", "loading m"), strict=True):
        write(tmp_path, "decode", replica, line(message))
    assert starting_workers(tmp_path, ["prefill", "decode"]) == (
        "prefill: calibrating step times; decode: 2 loading m, 1 serves m"
    )


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter({"service": "tandem-worker"})])
def test_both_formats_of_a_log_are_read_and_long_messages_cut(tmp_path: Path, formatter: logging.Formatter) -> None:
    write(tmp_path, "mixed", "a", line("x" * TAIL_BYTES), line("loading a model " + "y" * 90, formatter))
    shown = starting_workers(tmp_path, ["mixed"]).removeprefix("mixed: ")
    assert shown.startswith("loading a model y") and shown.endswith("y...") and len(shown) == MAX_MESSAGE
