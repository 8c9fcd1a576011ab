"""Test the signals, the banner and the secret of `tandem serve`, without a real server."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.cli.serve import SIGNALS, StopSignals, banner, keep_kv_on_loopback, run_secret
from tandem.core.config import Config, TransferConfig, WorkerConfig
from tandem.wire.secret_file import SecretFile


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_during_the_start_interrupts_it_once(number: signal.Signals) -> None:
    signals = StopSignals()
    undone = False
    with pytest.raises(KeyboardInterrupt), signals.starting():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
            undone = True
    assert undone and signals.has_received


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_after_the_start_is_recorded(number: signal.Signals) -> None:
    signals = StopSignals()
    with signals.starting():
        assert not signals.has_received
    signal.raise_signal(number)
    assert signals.has_received


def test_listen_replaces_the_handlers_of_a_library() -> None:
    signals = StopSignals()
    with signals.starting():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signals.listen()
    signal.raise_signal(signal.SIGTERM)
    assert signals.has_received


_PROGRAM = """
import ctypes
from tandem.cli.serve import StopSignals

signals = StopSignals()
with signals.starting():
    ctypes.pythonapi.PyRun_SimpleString(b"import signal; signal.raise_signal(signal.SIGINT)")
print(signals.has_received)
"""


def test_a_signal_inside_code_run_by_an_extension_does_not_end_the_process() -> None:
    """The interpreter remembers that a KeyboardInterrupt has left such code, even if it is caught later."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


_INTERRUPTED = """
import signal, sys
from tandem.cli.serve import StopSignals

signals, calls = StopSignals(), 0
signals.listen()

def interrupt(_frame, event, _function):
    global calls
    if event in ("call", "c_call") and calls < 50:
        calls += 1
        signal.raise_signal(signal.SIGINT)

sys.setprofile(interrupt)
signal.raise_signal(signal.SIGINT)
signals.wait(5)
sys.setprofile(None)
print(calls, signals.wait(5))
"""


def test_a_signal_may_interrupt_another_signal_and_the_wait() -> None:
    """A supervisor that signals a process and its group sends two signals at once."""
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, check=False, timeout=30)
    calls, has_received = done.stdout.split()
    assert (done.returncode, has_received) == (0, "True") and int(calls) > 3, done.stderr


def test_each_secret_is_new_private_and_removed_afterwards() -> None:
    with run_secret() as first, run_secret() as second:
        assert first.stat().st_mode & 0o777 == 0o600 and first.parent.stat().st_mode & 0o777 == 0o700
        (secret,), (other,) = SecretFile(first).current(0.0), SecretFile(second).current(0.0)
        assert secret != other and len(secret) == 64
    assert not first.parent.exists() and not second.parent.exists()


def test_the_secret_is_removed_when_the_start_fails_too() -> None:
    with pytest.raises(KeyboardInterrupt), run_secret() as path:
        raise KeyboardInterrupt
    assert not path.parent.exists()


@pytest.mark.parametrize("auth", ["off", "keys"])
def test_the_banner_has_every_address_and_at_most_twelve_lines(auth: str) -> None:
    config = Config()
    config = replace(
        config, gateway=replace(config.gateway, auth=auth), redis=replace(config.redis, url="redis://u:pw@r")
    )
    shown = banner("http://127.0.0.1:8000", "127.0.0.1:8001", config, Path("/logs"), shows_redis=True)
    assert len(shown.splitlines()) <= 12
    for part in (
        "http://127.0.0.1:8000/console",
        "over gRPC at 127.0.0.1:8001",
        "/logs",
        "tandem role --redis-url redis:",
    ):
        assert part in shown
    assert ("$TANDEM_API_KEY" in shown) is (auth == "keys")
    own_redis = banner("http://127.0.0.1:8000", "127.0.0.1:8001", config, Path("/logs"), shows_redis=False)
    assert "pw" not in own_redis


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        (Config(), {}, {"UCX_NET_DEVICES": "lo"}),
        (Config(), {"UCX_NET_DEVICES": "eth1"}, {"UCX_NET_DEVICES": "eth1"}),
        (Config(worker=WorkerConfig(host="0.0.0.0")), {}, {}),
        (Config(transfer=TransferConfig(require="rdma")), {}, {}),
    ],
)
def test_kv_moves_over_loopback_only_unless_it_cannot(
    config: Config, before: dict[str, str], after: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", before)
    keep_kv_on_loopback(config)
    assert before == after
