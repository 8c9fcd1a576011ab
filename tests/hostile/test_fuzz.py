"""Test every reader of foreign bytes with valid, broken and once harmful inputs; `make nightly` also fuzzes each."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import scaled
from tests.hostile.surface import PLACES, load, mutants

NUM_MUTANTS = 240
LEAK_BYTES = 32 << 20
SECONDS = 10
"""Of each fuzzer in `make nightly`; `tests/README.md` says how to run one for longer."""


@pytest.mark.parametrize("name", PLACES)
def test_valid_inputs_are_accepted(name: str) -> None:
    surface = load(name)
    for data in surface.seeds:
        surface.read(data)


@pytest.mark.parametrize("name", PLACES)
def test_inputs_that_once_showed_a_defect(name: str) -> None:
    surface = load(name)
    for data in surface.found:
        surface.check(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_broken_inputs_end_in_a_typed_error_and_leave_no_memory(name: str) -> None:
    surface = load(name)
    inputs = list(mutants(surface.seeds, scaled(NUM_MUTANTS)))
    sizes = []
    for _ in range(2):
        for data in inputs:
            surface.check(data)
        gc.collect()
        sizes.append(_resident_bytes())
    assert sizes[1] - sizes[0] < LEAK_BYTES


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed for this Python")
@pytest.mark.parametrize("name", PLACES)
def test_fuzzing_finds_nothing(name: str, tmp_path: Path) -> None:
    """The folder of inputs in the message has the input that failed."""
    command = [sys.executable, "-m", "tests.hostile.fuzz", name, "--seconds", str(SECONDS), "--inputs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, f"{tmp_path}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
