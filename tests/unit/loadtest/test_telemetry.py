"""The benchmark of telemetry: its table on rounds that can be checked by hand, and its receiver."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

import pytest
from opentelemetry.context import Context

from loadtest.processes.telemetry_processes import NUM_TURNS, TURNS, CoreSpeed, ProcessPlacement, pushing, sink
from loadtest.telemetry.telemetry import TelemetryReport, text
from loadtest.telemetry.telemetry_steps import StepTurn
from loadtest.telemetry.telemetry_streams import USES, StreamTurn
from tandem.obs.telemetry import Telemetry


def report(before: str = "") -> TelemetryReport:
    """Steps of 100 us of which telemetry adds 42, tokens of 50 us of which it adds 1."""
    steps = StepTurn(steps=1000, cpu_s=0.1, core_speed_s=0.1), StepTurn(steps=1000, cpu_s=0.142, core_speed_s=0.1)
    streams = (
        StreamTurn(num_tokens=10_000, cpu_s=0.5, core_speed_s=0.1),
        StreamTurn(num_tokens=10_000, cpu_s=0.51, core_speed_s=0.1),
    )
    return TelemetryReport(
        step_s=0.002,
        stream_step_s=0.004,
        before=before,
        steps={8: [steps] * 3},
        streams={use.name: [streams] * 3 for use in USES},
    )


def test_its_table() -> None:
    lines = text(report()).splitlines()
    assert lines[0].endswith("without: nobody looking and nothing counted.")
    assert lines[4] == "| a step of 8 | 100.0 | 142.0 | +42.0 | +2.00% | +2.00% to +2.00% | under | 3 |"
    assert lines[6].startswith("| a streamed token, all of it | 50.0 | 51.0")
    assert lines[5] == "| a streamed token, as installed | 50.0 | 51.0 | +1.0 | +2.00% | +2.00% to +2.00% | under | 3 |"
    assert "one every 4 ms; a core is enough for 20,000 tokens/s without and 19,608 with all of it" in lines[-1]
    assert text(report("/tmp/old")).splitlines()[0].endswith("without: the commit in /tmp/old.")


def test_sides_take_turns_alike() -> None:
    assert TURNS.count(0) == TURNS.count(1) == NUM_TURNS
    places = [sum(number for number, side in enumerate(TURNS) if side == each) for each in (0, 1)]
    assert places[0] == places[1], "a machine that gets slower slows both"


def test_the_core_speed_probe_reports_how_long_a_piece_of_work_takes() -> None:
    with ExitStack() as stack:
        core_speed = CoreSpeed(ProcessPlacement(max(os.sched_getaffinity(0)), None), stack)
        time.sleep(0.1)
        first = core_speed.lap()
        time.sleep(0.1)
        assert 0 < first < 0.1 and 0 < core_speed.lap() < 0.1
        assert CoreSpeed(ProcessPlacement(-1, None), stack).lap() == 1.0


@pytest.mark.slow
def test_its_receiver_takes_what_a_program_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        receiver = sink(stack)
        for name, value in pushing(receiver.ready["endpoint"]).items():
            monkeypatch.setenv(name, value)
        telemetry = Telemetry.start("tandem-test", "t", 10)
        telemetry.tracer.start_span("s", Context()).end()
        telemetry.close(20.0)
        last_report = receiver.last_words()
    assert last_report["traces"][0] == 1 and last_report["traces"][1] > 50 and last_report["metrics"][0] >= 1
