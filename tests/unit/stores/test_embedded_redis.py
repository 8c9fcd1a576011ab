"""Test that the embedded server is private, bounded in memory, and ends with its owner."""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from tandem.core.config import Bytes
from tandem.core.errors import TandemError
from tandem.stores.embedded_redis import EmbeddedServer, find_program

pytestmark = pytest.mark.redis

DEADLINE_S = 30.0

# Start the server from a thread that ends at once, to which a parent-death signal would be bound.
OWNER = """
import sys, threading
from tandem.core.errors import TandemError
from tandem.stores.embedded_redis import EmbeddedServer
servers = []
thread = threading.Thread(target=lambda: servers.append(EmbeddedServer.start()))
thread.start()
thread.join()
print(servers[0].url, flush=True)
sys.stdin.read()
"""


def pid_of(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.info("server")["process_id"])


def ends(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], DEADLINE_S)[0])


def run_dir(url: str) -> Path:
    return Path(url.removeprefix("unix://")).parent


def test_the_server_answers_and_is_private_and_bounded() -> None:
    with EmbeddedServer.start(memory=Bytes(4 << 20)) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
        assert stat.S_IMODE(run_dir(server.url).stat().st_mode) == 0o700
        config = client.config_get("*")
        assert config["port"] == "0"
        assert (config["save"], config["appendonly"]) == ("", "no")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            for i in range(100):
                client.set(f"key-{i}", bytes(1 << 17))
        assert client.get("key-0") == bytes(1 << 17)
    assert not run_dir(server.url).exists()


def test_stop_ends_the_server_and_may_be_called_again() -> None:
    server = EmbeddedServer.start()
    pidfd = os.pidfd_open(pid_of(server.url))
    assert server._process.poll() is None
    server.stop()
    server.stop()
    assert ends(pidfd)
    assert server._process.poll() is not None
    os.close(pidfd)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_server_dies_with_its_owner(how: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        pidfd = os.pidfd_open(pid_of(url))
        assert not select.select([pidfd], [], [], 0)[0]
        owner.send_signal(how)
    assert ends(pidfd)
    os.close(pidfd)


def test_the_server_dies_with_its_supervisor() -> None:
    with EmbeddedServer.start() as server:
        pidfd = os.pidfd_open(pid_of(server.url))
        os.kill(server._process.pid, signal.SIGKILL)
        assert ends(pidfd)
        os.close(pidfd)
    assert server._process.poll() is not None
    assert not run_dir(server.url).exists()


def test_ctrl_c_in_the_terminal_does_not_reach_the_server() -> None:
    with EmbeddedServer.start() as server:
        assert os.getpgid(pid_of(server.url)) != os.getpgid(0)


def test_the_output_of_a_failing_program_is_in_the_error(tmp_path: Path) -> None:
    program = tmp_path / "redis-server"
    program.write_text('#!/bin/sh\nfor last; do :; done\necho "no licence" > log\nexit 3\n')
    program.chmod(0o755)
    with pytest.raises(TandemError, match="did not start: no licence"):
        EmbeddedServer.start(program=program)


def test_a_missing_program_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TandemError, match=r"did not start: .*No such file"):
        EmbeddedServer.start(program=tmp_path / "nothing")


def test_a_server_on_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program() == program


def test_without_any_server_the_error_names_the_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TandemError, match="--redis-url"):
        find_program()


@pytest.mark.slow
def test_a_long_runtime_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with EmbeddedServer.start() as server, socket.socket(socket.AF_UNIX) as client:
        client.connect(server.url.removeprefix("unix://"))
