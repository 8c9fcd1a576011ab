"""Run an embedded Redis server as a child and stop it when the owner process ends, however that ends.

Run by path, without site packages: `redis_supervisor.py SOCKET LOG COMMAND...`. Standard input is a pipe whose other
end the owner holds: end-of-file means that the owner has closed it or died. Linux's parent-death signal
(`PR_SET_PDEATHSIG`) is bound to the *thread* that forked, so the owner cannot use it; this program has one thread and
uses it to end the server if the supervisor itself is killed. The program writes `ready` to standard output when the
server answers, or else the end of the server's log, and removes the directory of the socket when it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
_TAIL_BYTES = 500
_TERM_S = 3.0
"""Seconds between SIGTERM and SIGKILL; the server has nothing to save."""


def main(socket_path: str, log_path: str, command: list[str]) -> int:
    """Run the server until standard input or the server ends, or a signal arrives; return its exit status.

    The status is 1 where the server cannot be started. `command` starts the server, which listens at `socket_path` and
    logs to `log_path`. The directory of the socket is deleted at the end.
    """
    try:
        return _supervise(socket_path, log_path, command)
    except OSError as error:
        _report(str(error).encode())
        return 1
    finally:
        shutil.rmtree(Path(socket_path).parent, ignore_errors=True)


def _supervise(socket_path: str, log_path: str, command: list[str]) -> int:
    wake = _wake_on_signals()
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with(os.getpid(), signal.SIGKILL))
    if _wait_ready(server, socket_path, wake):
        _report(b"ready\n")
        select.select([0, wake], [], [])
    else:
        _report(_tail(log_path))
    return _stop(server)


def _report(text: bytes) -> None:
    """Write to the owner. If the owner has died, ignore the broken pipe: standard input ends too."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, text)


def _wait_ready(server: subprocess.Popen[bytes], socket_path: str, wake: int) -> bool:
    """Wait until the server answers; returns False if it has ended, the owner is gone, or a signal has arrived."""
    while not _answers(socket_path):
        if server.poll() is not None or select.select([0, wake], [], [], _POLL_S)[0]:
            return False
    return True


def _wake_on_signals() -> int:
    """Return a descriptor that becomes readable at SIGCHLD (the server ended), SIGTERM and SIGINT."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return reader


def die_with(parent: int, number: signal.Signals) -> Callable[[], None]:
    """Return a function for a forked child to call, after which the child receives the signal `number` when `parent`
    ends.

    `parent`: process id of the parent. If the parent has ended by the call, the child exits. Linux binds the signal to
    the thread that forked, so the parent must fork in its main thread. On other systems the function does nothing.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None).prctl  # before the fork, after which little is safe

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return arm


def _answers(socket_path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.settimeout(_TERM_S)
        client.connect(socket_path)
        client.sendall(b"PING\r\n")
        return client.recv(16).startswith(b"+PONG")
    return False


def _tail(log_path: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(log_path).read_bytes()[-_TAIL_BYTES:]
    return b""


def _stop(server: subprocess.Popen[bytes]) -> int:
    server.terminate()
    try:
        return server.wait(_TERM_S)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
