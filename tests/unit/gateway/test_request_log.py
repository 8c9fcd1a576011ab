"""Test the log line of each ended request: which requests have one, and its content."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.events import LaneYield, Pauses
from tandem.core.lane import Lane
from tandem.gateway.telemetry import request_log
from tandem.gateway.telemetry.request_log import LOGGER, RequestLog
from tandem.gateway.telemetry.request_record import RequestRecord
from tandem.gateway.telemetry.usage import Usage
from tandem.obs.logs.log_formatters import JsonFormatter
from tandem.obs.logs.log_rate_limit import UNLIMITED
from tandem.orchestration.phase_ledger import StageSeconds
from tests.unit.gateway.records import record

RECORD = record(
    label="r-1",
    trace="ab" * 16,
    traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01",
    model="m",
    reason="long_prompt",
    num_attempts=2,
    pauses=Pauses(3, 1.5),
    yields=(LaneYield(Lane.STANDARD, 1, 800, 50), LaneYield(Lane.BATCH, 2, 12, 1)),
    usage=Usage(100, 20, None),
    received_at=1e9,
    total_s=1.23456789,
    first_token_s=0.5,
    token_s=None,
    longest_gap_s=0.1,
    num_gaps=19,
    stages=StageSeconds(receive=0.25, decode=0.98456789),
)
REFUSED = replace(RECORD, outcome="quota_exceeded", error="x" * 9999, path="", workers=(), first_token_s=None)
LOST = replace(RECORD, outcome="worker_lost", error="worker d is gone")
STOPPING = replace(RECORD, outcome="draining", error="this gateway is shutting down")
CANCELLED = replace(RECORD, outcome="cancelled")
FORMATTER = JsonFormatter({"service": "tandem-gateway", "instance": "g", "pid": 1})


def lines(caplog: pytest.LogCaptureFixture, mode: Any, *records: RequestRecord) -> list[logging.LogRecord]:
    caplog.clear()
    with caplog.at_level(logging.INFO, LOGGER):
        for record in records:
            RequestLog(mode).answered(record)
    return list(caplog.records)


def outcome_of(line: logging.LogRecord) -> str:
    outcome: str = json.loads(FORMATTER.format(line))["outcome"]
    return outcome


def test_the_mode_selects_the_logged_requests(caplog: pytest.LogCaptureFixture) -> None:
    ended = (RECORD, REFUSED, LOST, STOPPING, CANCELLED)
    assert lines(caplog, "off", *ended) == []
    failed = lines(caplog, "failed", *ended)
    assert [(line.levelname, outcome_of(line)) for line in failed] == [
        ("INFO", "quota_exceeded"),
        ("WARNING", "worker_lost"),
        ("INFO", "draining"),
    ]
    assert not any(hasattr(line, UNLIMITED) for line in failed)
    every = lines(caplog, "all", *ended)
    assert [outcome_of(line) for line in every] == [one.outcome for one in ended]
    assert all(hasattr(line, UNLIMITED) for line in every)


def test_a_line_below_the_log_level_is_not_rendered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "_line", pytest.fail)
    with caplog.at_level(logging.WARNING, LOGGER):
        RequestLog("all").answered(RECORD)
        RequestLog("failed").answered(REFUSED)
    assert not caplog.records


def test_a_line_has_all_fields(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines(caplog, "all", RECORD)
    entry = json.loads(FORMATTER.format(line))
    expected = {
        "request_id": "r-1",
        "trace_id": "ab" * 16,
        "span_id": "cd" * 8,
        "id": "chatcmpl-1",
        "endpoint": "chat",
        "model": "m",
        "tenant": "acme",
        "lane": "interactive",
        "outcome": "finished",
        "reason": "long_prompt",
        "path": "remote",
        "workers": ["p", "d"],
        "attempts": 2,
        "preemptions": 3,
        "paused_s": 1.5,
        "yielded_sequences": 3,
        "yielded_tokens": 812,
        "yielded_blocks": 51,
        "is_streamed": True,
        "prompt_tokens": 100,
        "output_tokens": 20,
        "total_s": 1.234568,
        "first_token_s": 0.5,
        "longest_gap_s": 0.1,
    }
    assert {name: entry.get(name) for name in expected} == expected
    assert entry["stages"]["receive"] == 0.25 and len(entry["stages"]) == 9
    assert not {"error", "cached_tokens", "token_s"} & entry.keys()


def test_a_long_error_is_truncated(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines(caplog, "failed", REFUSED)
    entry = json.loads(FORMATTER.format(line))
    assert entry["error"] == "x" * 500 and "path" not in entry and entry["workers"] == []
