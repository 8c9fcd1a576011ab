"""Test a worker's step log on disk: complete after the worker's end, and never the cause of a worker error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.core.errors import TandemError
from tandem.engine.step_log import decode_log
from tandem.worker.engine import step_log_writer
from tandem.worker.engine.step_log_writer import StepWriter
from tests.unit.engine.test_step_log import HEAD, record


def test_every_step_is_there_after_the_end(tmp_path: Path) -> None:
    writer = StepWriter(tmp_path / "logs", HEAD)
    for number in range(1000):
        writer.observe(record(number))
    assert writer.close(10.0)
    assert writer.close(10.0)
    with writer.path.open() as file:
        log = decode_log(file, "log")
    assert [step.record.number for step in log.steps] == list(range(1000))
    stamps = [step.at for step in log.steps]
    assert stamps == sorted(stamps)


def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TandemError, match=r"worker\.step_log: cannot write") as refused:
        StepWriter(tmp_path / "file", HEAD)
    assert refused.value.param == "worker.step_log"


def test_a_disk_that_fails_later_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = StepWriter(tmp_path / "logs", HEAD)
    writer.path.unlink()
    writer.path.mkdir()
    for number in range(3):
        writer.observe(record(number))
        writer._flush()
    assert writer.close(10.0)
    assert ["no more steps are logged" in r.message for r in caplog.records] == [True]


def test_a_log_ends_where_the_disk_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk accepts a part of a line, then nothing, then everything again."""
    monkeypatch.setattr(step_log_writer, "FLUSH_S", 3600.0)
    writer = StepWriter(tmp_path / "logs", HEAD)
    writer.observe(record(0))
    writer._flush()
    with writer.path.open("a") as file:
        file.write('{"number": 1')
    path, writer.path = writer.path, tmp_path
    writer.observe(record(1))
    writer._flush()
    writer.path = path
    writer.observe(record(2))
    assert writer.close(10.0)
    with path.open() as file:
        assert [step.record.number for step in decode_log(file, "log").steps] == [0]
