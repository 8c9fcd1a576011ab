"""What the operating system says of this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.obs.metrics import process_metrics
from tandem.obs.metrics.instruments import PROCESS_CPU, PROCESS_FILES, PROCESS_MEMORY
from tandem.obs.metrics.metrics import Metrics


def figures(metrics: Metrics) -> dict[str, float]:
    found = {}
    for family in metrics.collect():
        (value,) = family.points.values()
        assert isinstance(value, int | float)
        found[family.instrument.name] = value
    return found


def test_a_process_knows_what_it_takes() -> None:
    metrics = Metrics()
    process_metrics.watch_process(metrics)
    before = figures(metrics)
    assert before.keys() == {PROCESS_CPU.name, PROCESS_MEMORY.name, PROCESS_FILES.name}
    assert before[PROCESS_MEMORY.name] > 2**20
    times = os.times()
    assert abs(before[PROCESS_CPU.name] - times.user - times.system) < 1.0
    memory = bytearray(os.urandom(2**12) * 2**13)
    with Path(os.devnull).open(), Path(os.devnull).open():
        after = figures(metrics)
    assert after[PROCESS_FILES.name] == before[PROCESS_FILES.name] + 2
    assert after[PROCESS_MEMORY.name] >= before[PROCESS_MEMORY.name] + len(memory) / 2


def test_other_systems_have_no_such_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_metrics, "_STAT", Path("/nowhere"))
    metrics = Metrics()
    process_metrics.watch_process(metrics)
    assert metrics.collect() == []
