"""What a signal does during and after the start; never to a real server."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tandem.cli.stop import SIGNALS, StopSignals


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_one_during_the_start_interrupts_it_once(number: signal.Signals) -> None:
    signals = StopSignals()
    undone = False
    with pytest.raises(KeyboardInterrupt), signals.starting():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
            undone = True
    assert undone and signals.event.is_set()


@pytest.mark.parametrize("number", SIGNALS)
def test_one_after_the_start_sets_the_event(number: signal.Signals) -> None:
    signals = StopSignals()
    with signals.starting():
        assert not signals.event.is_set()
    signal.raise_signal(number)
    assert signals.event.is_set()


def test_it_takes_the_signals_back_from_a_library() -> None:
    signals = StopSignals()
    with signals.starting():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signals.listen()
    signal.raise_signal(signal.SIGTERM)
    assert signals.event.is_set()


_PROGRAM = """
import ctypes
from tandem.cli.stop import StopSignals

signals = StopSignals()
with signals.starting():
    ctypes.pythonapi.PyRun_SimpleString(b"import signal; signal.raise_signal(signal.SIGINT)")
print(signals.event.is_set())
"""


def test_one_inside_what_an_extension_runs_does_not_end_the_process() -> None:
    """The interpreter keeps in mind that a KeyboardInterrupt left such code, whoever caught it later."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
